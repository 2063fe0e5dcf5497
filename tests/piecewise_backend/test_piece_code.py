"""A piece as code to read: what was traced, and what Inductor made of it."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecewise_backend.backend import mrv2, reset
from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.piece_code import generated_code, readable_code
from piecewise_backend.program import Program
from piecewise_backend.split import Segment, split
from tests.piecewise_backend.operators import triple


def smooth(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.gelu(x @ w)
    return triple(hidden).softmax(-1)


def compiled_program(function: Callable[..., Any], **options: Any) -> Program:
    programs = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        made = mrv2(gm, examples, options={"recorder": "none", "splitting_ops": ["probe::triple"], **options})
        programs.append(made.program)
        return made

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=True)(torch.randn(4, 8), torch.randn(8, 8))
    return programs[0]


def segments(function: Callable[..., Any], *args: Any) -> tuple[Segment, ...]:
    found: list[Segment] = []

    def backend(gm: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        found.extend(split(gm, find_breakpoints(("probe::triple",))).segments)
        return gm.forward

    torch.compile(function, backend=backend, dynamic=True)(*args)
    return tuple(found)


def as_module(code: str) -> types.ModuleType:
    module = types.ModuleType("piece")
    exec(compile(code, "piece.py", "exec"), module.__dict__)
    return module


def test_the_readable_code_of_a_piece_shows_its_operators_shapes_and_lines() -> None:
    first, _, last = segments(smooth, torch.randn(4, 8), torch.randn(8, 8))
    code = readable_code(first.module)
    assert "torch._C._nn.gelu" in code
    assert "f32[s" in code
    assert "cpu" in code
    assert f"{Path(__file__).name}:" in code
    assert "gelu(x @ w)" in code
    assert "softmax" in readable_code(last.module)
    assert "softmax" not in code


def test_the_readable_code_of_a_piece_runs_as_the_piece_does() -> None:
    first, *_ = segments(smooth, torch.randn(4, 8), torch.randn(8, 8))
    given = [4 if isinstance(n.meta["example_value"], torch.SymInt) else torch.randn(8, 8)
             for n in first.module.graph.nodes if n.op == "placeholder"]  # fmt: skip
    again = as_module(readable_code(first.module)).GraphModule()
    torch.testing.assert_close(again(*given), first.module(*given))


def test_a_function_made_inside_of_another_is_named_in_a_comment() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(lambda x: x, (graph.placeholder("x"),)),))
    code = readable_code(torch.fx.GraphModule({}, graph))
    as_module(code)
    assert "which no import reaches" in code


@pytest.mark.parametrize("where", ["fresh", "on disk"])
def test_inductors_code_of_a_piece_holds_its_kernels(where: str, artifact_dir: Path) -> None:
    reset()
    programs = [compiled_program(smooth)]
    if where == "on disk":
        reset()
        programs.append(compiled_program(smooth))
    assert {p.source for p in programs[-1].pieces} == {"inductor" if where == "fresh" else "disk"}
    codes = [generated_code(piece.key) for piece in programs[-1].pieces]
    assert all(code is not None and "def call" in code and "cpp_fused" in code for code in codes)
    assert "erf" in str(codes[0])
    assert "exp" in str(codes[1])
    for code in codes:
        compile(str(code), "output_code.py", "exec")


def test_a_piece_that_inductor_did_not_make_has_no_generated_code() -> None:
    program = compiled_program(smooth, compiler="eager", cache=False)
    assert [generated_code(piece.key) for piece in program.pieces] == [None, None]
    assert generated_code("no such key") is None
