"""What happened when: spans of loading and of waiting, and the ring that keeps the recent ones."""

from stoker.timeline.chrome import to_chrome_trace
from stoker.timeline.ring import Ring
from stoker.timeline.span import TRAINER, Kind, Span, worker_lane

__all__ = ["TRAINER", "Kind", "Ring", "Span", "to_chrome_trace", "worker_lane"]
