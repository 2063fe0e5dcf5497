"""What others' tools see: PyTorch's structured trace, and its log settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os
import torch
from torch.nn.functional import gelu
import tests.piecewise_backend.operators

def model(x):
    return torch.ops.probe.triple(gelu(x)).softmax(-1)

options = {
    "recorder": "emulated", "splitting_ops": ["probe::triple"], "capture_after": 1, "compiler": os.environ["COMPILER"],
}
with torch.no_grad():
    torch.compile(model, backend="mrv2", options=options)(torch.randn(4, 8))
"""


def run(tmp_path: Path, **environment: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = (
        os.environ
        | {"PYTHONPATH": str(ROOT), "COMPILER": "eager", "MRV2_CACHE_DIR": str(tmp_path / "cache")}
        | environment
    )
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def artifacts(folder: Path) -> dict[str, str]:
    """Name to payload of every artifact in a trace: a line of JSON, then lines that begin with a tab."""
    found: dict[str, str] = {}
    (log,) = folder.glob("*.log")
    name = ""
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            found[name] = found.get(name, "") + line[1:] + "\n"
        elif "{" in line:
            name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name", "")
    return found


def test_a_torch_trace_holds_the_split_the_pieces_and_the_resolution(tmp_path: Path) -> None:
    run(tmp_path, COMPILER="inductor", TORCH_TRACE=str(tmp_path / "trace"))
    found = artifacts(tmp_path / "trace")
    split = found["mrv2_split"].splitlines()
    assert [line.split(" (")[0] for line in split[:3]] == ["piece 0", "probe::triple 1", "piece 2"]
    pieces = {name: text for name, text in found.items() if name.startswith("mrv2_piece_")}
    assert any("gelu" in text for text in pieces.values())
    assert sum("cpp_fused" in text for name, text in found.items() if name.startswith("mrv2_code_")) == 2
    decided = json.loads(found["mrv2_resolution"])
    assert decided["mode"] == {"requested": "FULL_AND_PIECEWISE", "resolved": "FULL_AND_PIECEWISE"}
    assert decided["recorder"] == "emulated"
    assert isinstance(decided["reasons"], list)


@pytest.mark.parametrize("setting", ["+piecewise_backend", "piecewise_backend.plain"])
def test_torch_logs_shows_our_log_lines(tmp_path: Path, setting: str) -> None:
    shown = run(tmp_path, TORCH_LOGS=setting)
    assert "captured PIECEWISE" in shown
    assert ("piece " in shown and "2 pieces" in shown) is (setting == "+piecewise_backend")
    assert "captured PIECEWISE" not in run(tmp_path)
