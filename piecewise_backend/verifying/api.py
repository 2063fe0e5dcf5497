"""`verify(compiled, inputs)`: does a compiled model compute what it computes without being compiled?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from piecewise_backend.backend import calls_go_to
from piecewise_backend.padding import SavedState
from piecewise_backend.program import Program
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner.llm import LLM
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.verifying import plain, runner
from piecewise_backend.verifying.check import check
from piecewise_backend.verifying.compare import distance
from piecewise_backend.verifying.result import Checked, Difference, Fault, Verification
from piecewise_backend.verifying.walks import FilledAllocations, as_traced, copied


def verify(compiled: Any, inputs: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
    """Compare every captured size of `compiled` with eager, step by step.

    compiled: what `torch.compile(model, backend="mrv2")` returned; `inputs` is then the tuple of its arguments, or one
    tensor, and `kwargs` its keyword arguments. Other captured sizes repeat or leave out the rows of these.
    Or an `LLM` or `ModelRunner`: `inputs` is then None, for a batch made up for each captured descriptor, or a list of
    `ScheduledRequest`.

    Each compiled piece is compared with the piece as traced on the same inputs; each replay with the pieces run without
    graphs; so the first step that is wrong is named with who is at fault: the compiler or the replay, and for a
    compiled function also whether the traced graphs are the model's. Every tensor that the graphs write to is put back,
    random states and a module's own attributes too; what else Python code of the model does, it does twice.

    Never raises for what it finds: see `Verification.ok` and `raise_if_wrong()`. TypeError for something that cannot be
    verified, ValueError for inputs that the model itself does not take, or requests beyond a runner's limits.
    """
    if isinstance(compiled, LLM):
        compiled = compiled.runner
    if isinstance(compiled, ModelRunner):
        cases = runner.cases_of(compiled, inputs)
        return Verification(subject=type(compiled.model).__name__, checked=tuple(map(check, cases)))
    eager = _eager_of(compiled)
    args = inputs if isinstance(inputs, tuple) else tuple(inputs) if isinstance(inputs, list) else (inputs,)
    return _Verifier(compiled, eager, () if inputs is None else args, dict(kwargs or {})).run()


def _eager_of(compiled: Any) -> Callable[..., Any]:
    eager = getattr(compiled, "_orig_mod", None) or getattr(compiled, "_torchdynamo_orig_callable", None)
    if eager is None and getattr(compiled, "_compiled_call_impl", None) is not None:
        eager = compiled.forward  # module.compile(backend="mrv2")
    if eager is None:
        raise TypeError(
            f"a {type(compiled).__name__} cannot be verified; allowed: what torch.compile(model, backend='mrv2') "
            "returned, an LLM, a ModelRunner"
        )
    return eager


class _Verifier:
    """One compiled function and one call of it."""

    def __init__(self, compiled: Any, eager: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.compiled, self.eager, self.args, self.kwargs = compiled, eager, args, kwargs
        self.checked: list[Checked] = []
        self.saved: list[SavedState] = []
        self.is_random = False

    def run(self) -> Verification:
        name = getattr(self.eager, "__qualname__", type(self.eager).__name__)
        whole: tuple[Difference, ...] = ()
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), _attributes_kept(self.compiled), torch.no_grad():
            try:
                with calls_go_to(self._check_graph):
                    traced = list(map(copied, tree_leaves(self.compiled(*self.args, **self.kwargs))))
                whole = self._against_eager(traced)
            except Exception as error:
                self._check_inputs()
                whole = (_error(f"the call failed: {type(error).__name__}: {error}"),)
            finally:
                self._restore()
        if not self.checked and not whole:
            whole = (_error("no graph compiled by mrv2 ran: the model was run by Python alone, or by another backend"),)
        return Verification(subject=name, checked=tuple(self.checked), differences_of_whole=whole)

    def _check_graph(
        self, program: Program, report: Report, caller: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """In place of a call of one graph: check it, then give back what it computes as traced."""
        self.saved.append(SavedState(program, args))
        self.is_random |= program.is_random
        cases, notes = plain.cases_of(program, caller, args, f"graph {len(self.saved) - 1}")
        with torch.no_grad():
            found = [check(case) for case in cases]
            with FilledAllocations(0.0):
                results = as_traced(program).run(args)
        if notes:
            found[-1] = _with_notes(found[-1], notes)
        self.checked.extend(found)
        return results

    def _against_eager(self, traced: list[Any]) -> tuple[Difference, ...]:
        self._restore()
        if self.is_random:
            return ()
        with FilledAllocations(0.0):  # what nothing writes is then equal
            expected = tree_leaves(torch.compiler.disable(self.eager)(*self.args, **self.kwargs))
        for index, (one, other) in enumerate(zip(expected, traced, strict=True)):
            if (off := distance(one, other)) is not None:
                return (
                    Difference(
                        size="the call",
                        fault=Fault.TRACING,
                        step=f"result {index}",
                        max_abs=off.max_abs,
                        max_rel=off.max_rel,
                        tolerance=off.allowed,
                        detail=off.detail or "the graphs as traced give another result than the model itself",
                    ),
                )
        return ()

    def _check_inputs(self) -> None:
        """ValueError where the model itself, not compiled, fails on the inputs."""
        self._restore()
        try:
            torch.compiler.disable(self.eager)(*self.args, **self.kwargs)
        except Exception as error:
            raise ValueError(
                f"the model itself fails on these inputs: {type(error).__name__}: {error}. verify takes what the model "
                "is called with: a tuple of its arguments, or one tensor"
            ) from error

    def _restore(self) -> None:
        for saved in reversed(self.saved):
            saved.restore()


def _with_notes(checked: Checked, notes: Sequence[str]) -> Checked:
    return dataclasses.replace(checked, notes=(*checked.notes, *notes))


def _error(detail: str) -> Difference:
    return Difference(size="the call", fault=Fault.ERROR, step="the check", detail=detail)


@contextlib.contextmanager
def _attributes_kept(compiled: Any) -> Iterator[None]:
    """A module's own attributes are as before afterwards: counters, positions, buffers that were replaced."""
    module = getattr(compiled, "_orig_mod", compiled)
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    before = [(m, dict(m.__dict__), dict(m._buffers), dict(m._parameters)) for m in modules]
    try:
        yield
    finally:
        for m, attributes, buffers, parameters in before:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)
            m._parameters.clear()
            m._parameters.update(parameters)
