"""`write_repro`: a script that stands alone, says what is right, and fails where the compiler is wrong."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

import piecewise_backend
from tests.piecewise_backend.operators import triple
from tests.tiny import make_runner

ROOT = Path(__file__).resolve().parents[2]

WRONG_COMPILER = """
import dataclasses, runpy, sys
from piecewise_backend.compile import PieceCompiler

right = PieceCompiler._compile

def wrong(self, module, *rest):
    piece = right(self, module, *rest)
    return dataclasses.replace(piece, run=lambda *args: tuple(r * 1.01 for r in piece.run(*args)))

PieceCompiler._compile = wrong
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.table = torch.nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        hidden = triple(gelu(self.linear(x)))
        return (hidden.T.reshape(x.shape) + self.table(ids)).softmax(-1)


def compiled(**options: Any) -> Callable[..., Any]:
    given = {"recorder": "emulated", "compiler": "aot_eager", "cache": False, "splitting_ops": ["probe::triple"]}
    function = torch.compile(Model(), backend="mrv2", options=given | options)
    x, ids = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])
    for given in (x, ids):
        torch._dynamo.mark_dynamic(given, 0)
    with torch.no_grad():
        function(x, ids)
    return function


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("piece", "compiler"), [("piece 0", "aot_eager"), (2, "inductor")])
def test_the_script_of_a_right_piece_passes_in_a_process_of_its_own(piece: Any, compiler: str, tmp_path: Path) -> None:
    script = piecewise_backend.write_repro(compiled(compiler=compiler), piece, tmp_path / "repro.py")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert "agrees with eager" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("graph 0"))
    assert "rows" in line
    assert line.split()[-5:] == ["1", "1", "compared", "as", "eager"]


def test_the_script_fails_where_the_compiler_is_wrong(tmp_path: Path) -> None:
    function = compiled()
    key = piecewise_backend.report(function).structures
    (last,) = [p.key for p in key.values() if p.key is not None and "softmax" in dict(p.launches)]
    script = piecewise_backend.write_repro(function, last[:12], tmp_path / "repro.py")
    done = run("-c", WRONG_COMPILER, str(script))
    assert done.returncode == 1, done.stderr
    assert "the compiler is wrong" in " ".join(done.stdout.split())


def test_a_piece_of_a_runner_that_writes_its_cache_runs_alone(tmp_path: Path) -> None:
    script = piecewise_backend.write_repro(make_runner(capture_sizes=[4]), "piece 2", tmp_path / "repro.py")
    assert "write_kv_cache" in script.read_text()
    done = run(str(script))
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_step_that_is_not_there_or_needs_a_batch_is_refused(tmp_path: Path) -> None:
    runner = make_runner(capture_sizes=[4])
    with pytest.raises(ValueError, match="allowed: 0 to 6"):
        piecewise_backend.write_repro(runner, "piece 99", tmp_path / "repro.py")
    with pytest.raises(ValueError, match="metadata"):
        piecewise_backend.write_repro(runner, 1, tmp_path / "repro.py")
    assert not (tmp_path / "repro.py").exists()
