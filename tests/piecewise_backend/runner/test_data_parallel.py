"""Ranks that serve uneven loads in step: four processes over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from piecewise_backend.runner import DataParallel
from piecewise_backend.runner.data_parallel import StepFacts

RANK = Path(__file__).with_name("rank.py")
WORLD_SIZE = 4


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(WORLD_SIZE), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD_SIZE)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("speculates", [False, True])
def test_four_ranks_with_uneven_loads_decide_alike_and_get_the_right_tokens(tmp_path: Path, speculates: bool) -> None:
    """R34, then 200 steps of requests coming and going."""
    if speculates:
        (tmp_path / "speculate").touch()
    ranks = run_ranks(tmp_path)
    for rank in ranks:
        assert rank["uneven"] == ["NONE 17"], "3, 17, 0 and 5 tokens: more than the largest size on one rank"
        assert rank["decisions"] == ranks[0]["decisions"], "the same mode and padded size on all, idle or not"
        assert rank["wrong"] == []
        assert rank["replays"] > 50
    modes = {decision.split()[0] for decision in ranks[0]["decisions"]}
    assert modes == {"NONE", "PIECEWISE", "FULL"} if not speculates else {"NONE", "PIECEWISE"} <= modes
    assert ranks[0]["served"] < min(rank["served"] for rank in ranks[1:]), "rank 0 idles for long"


def test_without_a_process_group_the_error_names_the_call_that_is_missing() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        DataParallel()


@pytest.mark.parametrize(
    ("ranks", "agreed"),
    [
        ([(3, 3, 1), (5, 5, 1), (0, 0, None)], (5, 5, 1)),  # an idle rank keeps nobody from decode graphs
        ([(4, 2, 2), (3, 3, 1)], (4, 3, None)),
        ([(4, 4, 1), (17, 2, None)], (17, 4, None)),
        ([(0, 0, None), (0, 0, None)], (0, 0, None)),
    ],
)
def test_what_ranks_agree_on(
    ranks: list[tuple[int, int, int | None]], agreed: tuple[int, int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", len(ranks)), ("get_backend", "")):
        monkeypatch.setattr(torch.distributed, name, lambda *_, _value=value: _value)

    def gather(rows: torch.Tensor, row: torch.Tensor, group: object) -> None:
        assert row.tolist() == [n or 0 for n in ranks[0]]
        rows.copy_(torch.tensor([[n or 0 for n in rank] for rank in ranks]).flatten())

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    assert DataParallel().agree(StepFacts(*ranks[0])) == StepFacts(*agreed)
