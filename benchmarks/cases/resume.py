"""Going on at 90 % of an epoch of slow samples: how long until the next batch is there?

4000 samples that take 2 ms each to come (a sleep), batch 16, 2 workers, shuffled. A run over the
same samples without the sleep leads to 90 % and gives the state there, and the batches that would
have followed. Then a new loader is made; the clock runs from before `load_state_dict` to its first
batch. torch's loader has no state: its epoch is begun anew with the same seed, and the batches that
were seen are loaded again and thrown away. `torch_skipping` leaves out their indices instead, by a
batch sampler around the loader's own, as Accelerate's `skip_first_batches` does.

A sample is its index and one random number, drawn in the worker: both are compared.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.case import Case, Context, Measurement, Round, Row, Summary, Target
from benchmarks.contenders import LoaderSpec, load_library, make_loader
from benchmarks.intervals import interval, paired_ratio, values_of
from benchmarks.throughput import same_checksums

SAMPLES, BATCH, SEEN_SHARE = 4000, 16, 0.9
SAMPLE_SECONDS = 0.002
COMPARED = 3
MOST_OF_TORCH = 0.2
MOST_STATE_MICROSECONDS = 20.0
ALL_THE_SAME = "same samples and augmentations"
HAVE_A_STATE = ("stoker", "torchdata")
SAME_ORDER = ("torch", "torch_skipping", "stoker")
"""torchdata's sampler draws its seed at another moment, so its order is another from the start."""


class Augmented:
    """Samples that come late: an index, and a draw from the worker's random stream."""

    def __init__(self, samples: int, seconds: float) -> None:
        self._samples = samples
        self._seconds = seconds

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if self._seconds:
            sleep(self._seconds)
        return index, torch.rand(2)


class SkipFirst:
    """A batch sampler that draws the first batches of indices, and leaves them out."""

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self._batch_sampler = batch_sampler
        self._count = count

    def __len__(self) -> int:
        return len(self._batch_sampler) - self._count

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._batch_sampler, self._count, None)


class Resume(Case):
    """Seconds to the first batch after a resume, and microseconds for a state."""

    kind = "resume"
    name = "resume"
    title = "Resume at 90 % of 4000 samples of 2 ms, batch 16, 2 workers, shuffled"
    contenders = ("torch", "torch_skipping", "torchdata", "stoker")

    def estimated_seconds(self, contender: str, quick: bool) -> float:
        return 4.0 if quick or contender != "torch" else 8.0

    def measure(
        self, contender: str, context: Context, baseline: Callable[[], None]
    ) -> Measurement:
        torch.set_num_threads(1)
        load_library(contender)
        samples = SAMPLES // 5 if context.quick else SAMPLES
        seen = int(samples * SEEN_SHARE) // BATCH
        baseline()
        torch.manual_seed(0)
        state, calls, expected = run_to(contender, samples, seen)
        spec = LoaderSpec(Augmented(samples, SAMPLE_SECONDS), BATCH, shuffle=True)
        loader = make_loader(contender, spec)
        # What has a state must find the order in it, not in the trainer's generator.
        torch.manual_seed(0 if state is None else 1)
        started = perf_counter()
        if state is not None:
            loader.load_state_dict(state)
        elif contender == "torch_skipping":
            rest: Any = SkipFirst(loader.batch_sampler, seen)
            workers = loader.num_workers
            loader = DataLoader(loader.dataset, batch_sampler=rest, num_workers=workers)
        batches = iter(loader)
        if contender == "torch":
            for _ in range(seen):
                next(batches)
        first = next(batches)
        seconds = perf_counter() - started
        got = [first, *(next(batches) for _ in range(COMPARED - 1))]
        result: Measurement = {
            "seconds": seconds,
            "same_samples": prints(got, 0) == prints(expected, 0),
            "same_augmentations": prints(got, 1) == prints(expected, 1),
            "checksums": prints(got, 0),
        }
        if calls:
            result["state_microseconds"] = median(calls) * 1e6
        if contender == "torchdata":
            result["version"] = version("torchdata")
        return result

    def summarise(self, rounds: Sequence[Round]) -> Summary:
        ordered = [{who: got for who, got in r.items() if who in SAME_ORDER} for r in rounds]
        agree = same_checksums(ordered)
        summary = Summary(targets=[Target("the sampler's order, as torch's", *agree)])
        for contender in self.contenders:
            waits = values_of(rounds, contender, seconds_of)
            if not waits:
                continue
            ratio = paired_ratio(rounds, contender, "torch", seconds_of)
            note = what_followed(rounds, contender)
            summary.rows.append(Row(contender, "wait", interval(waits), "s", ratio, note))
            if contender in HAVE_A_STATE:
                costs = values_of(rounds, contender, microseconds_of)
                summary.rows.append(Row(contender, "state_dict", interval(costs), "us"))
        summary.targets.extend(targets(rounds))
        return summary


def run_to(contender: str, samples: int, seen: int) -> tuple[Any, list[float], list[Any]]:
    """The state after so many batches, what each call for one took, and what comes next."""
    loader = make_loader(contender, LoaderSpec(Augmented(samples, 0.0), BATCH, shuffle=True))
    batches = iter(loader)
    state, calls = None, []
    for _ in range(seen):
        next(batches)
        if contender in HAVE_A_STATE:
            asked = perf_counter()
            state = loader.state_dict()
            calls.append(perf_counter() - asked)
    saved = pickle.dumps(state)
    return pickle.loads(saved), calls, [next(batches) for _ in range(COMPARED)]


def prints(batches: list[Any], part: int) -> list[int]:
    """Checksums of one part of each batch: 0 are the indices, 1 the augmentations."""
    from benchmarks.consume import fingerprint

    return [fingerprint(batch[part]) for batch in batches]


def what_followed(rounds: Sequence[Round], contender: str) -> str:
    """Whether the batches after a resume were those of the run that went on, in every round."""
    got = [round_[contender] for round_ in rounds if contender in round_]
    if not all(one["same_samples"] for one in got):
        return "OTHER SAMPLES"
    if not all(one["same_augmentations"] for one in got):
        return "same samples, other augmentations"
    return ALL_THE_SAME


def targets(rounds: Sequence[Round]) -> list[Target]:
    """What was asked of Stoker."""
    costs = values_of(rounds, "stoker", microseconds_of)
    if not costs:
        return []
    follows = what_followed(rounds, "stoker")
    cost = interval(costs).median
    found = [
        Target("what an uninterrupted run delivers", follows, follows == ALL_THE_SAME),
        Target(
            f"state_dict() below {MOST_STATE_MICROSECONDS:g} us in mid-epoch",
            f"{cost:.1f} us",
            cost < MOST_STATE_MICROSECONDS,
        ),
    ]
    ratio = paired_ratio(rounds, "stoker", "torch", seconds_of)
    if ratio is not None:
        got = f"{ratio.median:.3f} of torch's wait [{ratio.low:.3f}, {ratio.high:.3f}]"
        text = f"at most {MOST_OF_TORCH:g} of torch's wait"
        found.append(Target(text, got, ratio.median <= MOST_OF_TORCH))
    return found


def seconds_of(got: Measurement) -> float:
    """The wait for the first batch after a resume."""
    return float(got["seconds"])


def microseconds_of(got: Measurement) -> float:
    """The median call of `state_dict()`, one after each batch."""
    return float(got["state_microseconds"])


CASE = Resume()
