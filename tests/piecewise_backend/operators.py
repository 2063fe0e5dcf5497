"""Operators at which the tests split, and the check that every test of the pipeline ends with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from piecewise_backend.backend import mrv2
from piecewise_backend.program import Program

DYNAMIC = pytest.mark.parametrize("dynamic", [(), (0,)], ids=["static", "dynamic"])
COMPILERS = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


@torch.library.custom_op("probe::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("probe::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


@torch.library.custom_op("probe::many", mutates_args=())
def many(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [x + i for i in range(n)]


@torch.library.custom_op("probe::write", mutates_args=("out",))
def write(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("probe::reshape", mutates_args=())
def reshape(x: torch.Tensor, size: list[int], add: int = 1) -> torch.Tensor:
    return x.reshape(size) + add


@torch.library.custom_op("probe::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


seen_settings: list[tuple[Any, ...]] = []


@torch.library.custom_op("probe::settings", mutates_args=())
def settings(x: torch.Tensor) -> torch.Tensor:
    """Notes the settings of the process that it runs under."""
    seen_settings.append(
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )
    )
    return x + 1


for operator in (triple, settings):
    operator.register_fake(torch.empty_like)
pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
many.register_fake(lambda x, n: [torch.empty_like(x) for _ in range(n)])
write.register_fake(lambda x, out: None)
reshape.register_fake(lambda x, size, add=1: x.new_empty(size))
positive.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
ALL = ("probe::triple", "probe::pair", "probe::many", "probe::write", "probe::reshape", "probe::positive")


def sdpa_backends() -> list[Any]:
    return _cur_sdpa_kernel_backends(True)


def same_as_eager(
    model: Callable[..., Any],
    *args: Any,
    splitting_ops: Sequence[Any] = ALL,
    dynamic: Sequence[int] = (),
    compiler: str = "eager",
    **options: Any,
) -> list[Program]:
    """Compile `model` whole, compare results and written arguments with eager; the programs, one per graph.

    `dynamic`: the positions of arguments whose dimension 0 is marked dynamic.
    """
    programs = []

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        compiled = mrv2(
            gm, examples, options={"compiler": compiler, "splitting_ops": splitting_ops, "cache": False, **options}
        )
        programs.append(compiled.program)
        return compiled

    expected_args, actual_args = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
    for position in dynamic:
        torch._dynamo.mark_dynamic(actual_args[position], 0)
    with torch.no_grad():
        expected = (copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model)(*expected_args)
        actual = torch.compile(model, backend=backend)(*actual_args)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_args, expected_args)
    return programs


def names(program: Program) -> list[str]:
    """ "piece", or the name of the breakpoint, for each step."""
    return [step.breakpoint.name if step.breakpoint else "piece" for step in program.steps]
