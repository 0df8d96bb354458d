from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.process.elastic_ranks import LENGTH, PLAN


def test_an_epoch_begun_by_four_ranks_is_finished_by_two_and_three(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.process.elastic_ranks", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    segments = json.loads(done.stdout)
    assert [segment["world"] for segment in segments] == [world for world, _ in PLAN]
    consumed: list[int] = []
    for segment in segments:
        seen, states, lengths = zip(*segment["ranks"], strict=True)
        assert len({len(indices) for indices in seen}) == 1
        assert all(state == states[0] for state in states)
        assert len(set(lengths)) == 1
        for step in zip(*seen, strict=True):  # the order in which the world as a whole saw them
            consumed += step
    # 4 x 9, 2 x 15, and 35 left for three: 12 each, one of them padding.
    assert [len(segment["ranks"][0][0]) for segment in segments] == [9, 15, 12]
    generator = torch.Generator()
    generator.manual_seed(5 + 2)
    order = torch.randperm(LENGTH, generator=generator).tolist()
    assert consumed == [*order, order[0]]
    assert Counter(consumed).most_common(2) == [(order[0], 2), (order[1], 1)]
