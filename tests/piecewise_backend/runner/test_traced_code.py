"""A traced program depends on the files that its code was read from."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from pathlib import Path
from piecewise_backend.config import Options
from piecewise_backend.runner.trace import trace
from a_model import Model
x = torch.randn(12, 4)
bound = trace(Model().eval(), (x,), 6, Options(cache_dir=Path(sys.argv[1])))
torch.testing.assert_close(bound.run(5)[0], Model()(x[:5]))
print(bound.report.program_source)
"""
MODEL = """
import torch
from a_helper import helper
class Model(torch.nn.Module):
    def forward(self, x):
        return helper(x) * {factor}
"""
HELPER = """
def inner(x):
    return x.sin() + {shift}
def helper(x):
    return inner(x)
"""


def test_a_model_whose_source_was_edited_is_traced_again_by_the_next_process(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"

    def run(factor: int, shift: int) -> str:
        (tmp_path / "a_model.py").write_text(MODEL.format(factor=factor))
        (tmp_path / "a_helper.py").write_text(HELPER.format(shift=shift))
        (tmp_path / "script.py").write_text(SCRIPT)
        paths = [str(tmp_path), str(Path(__file__).parents[3])]
        code = (
            f"import sys; sys.path[:0] = {paths!r}; sys.dont_write_bytecode = True; sys.argv = ['', {str(cache_dir)!r}]"
        )
        command = [sys.executable, "-c", f"{code}; exec(open({str(tmp_path / 'script.py')!r}).read())"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert [run(2, 3), run(2, 3)] == ["traced", "disk"]
    assert [run(5, 3), run(2, 7), run(2, 3)] == ["traced", "traced", "disk"]
