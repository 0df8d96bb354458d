"""The cases, by name. Each is a file that defines CASE; only the one asked for is imported."""

from __future__ import annotations

from importlib import import_module

from benchmarks.case import Case

NAMES = (
    "sample140mb",
    "sample140mb_fresh",
    "lidar",
    "images_f32",
    "images_u8",
    "small_f32",
    "tokens",
    "custom_collate",
    "jpeg",
    "outliers",
    "known_slow",
    "memory",
    "shared",
    "resize_workers",
    "resize_bytes",
    "resume",
    "first_batch_fork",
    "first_batch_spawn",
    "first_batch_forkserver",
    "trainer_cost",
    "timeline_cost",
)


def find_case(name: str) -> Case:
    """The case of that name."""
    case: Case = import_module(f"benchmarks.cases.{name}").CASE
    return case
