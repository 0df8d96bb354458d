"""What a loader may be told to use. Pure values; nothing here measures, decides or acts."""

from stoker.plan.knobs import Knobs

__all__ = ["Knobs"]
