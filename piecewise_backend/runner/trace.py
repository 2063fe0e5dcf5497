"""A model to one program that serves every size: one Dynamo trace, then Dynamo is out of the way."""

from __future__ import annotations

import itertools
import re
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attention import layers
from attention.kernels.ahead import Launch
from piecewise_backend.backend import compile_graph
from piecewise_backend.breakpoints import target_names
from piecewise_backend.collector import collector_paused
from piecewise_backend.compiler_start import start_compile_workers
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.rows import TokenDim
from piecewise_backend.merge_linears import Merged, merge_linears
from piecewise_backend.observe import observers
from piecewise_backend.program import Operands, Program
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner.plain_state import fixed_state, plain_state
from piecewise_backend.runner.trace_cache import TraceCache, Traced


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program with everything it reads: parameters, caches, and the runner's buffers at full length."""

    program: Program
    report: Report
    dim: TokenDim
    args: tuple[Any, ...]
    varying: tuple[int, ...]
    """Indices of `args` that depend on the number of tokens."""

    def args_for(self, num_tokens: int) -> list[Any]:
        """Arguments of a pass over `num_tokens` tokens: views of the buffers."""
        args = list(self.args)
        for index in self.varying:
            args[index] = self.dim.narrow(args[index], self.program.inputs[index].fake, num_tokens)
        return args

    def run(self, num_tokens: int) -> tuple[Any, ...]:
        """The compiled pieces one after another, without graphs."""
        return self.program.run(self.args_for(num_tokens))


@collector_paused()
def trace(
    model: nn.Module,
    buffers: Sequence[torch.Tensor],
    num_tokens: int,
    options: Options,
    launches_of: Callable[[Operands], Sequence[Launch]] | None = None,
) -> BoundProgram:
    """Call `model` once on the first `num_tokens` rows of `buffers` and keep the program that came of it. A program
    that an earlier trace of the same model left on disk is taken instead, where nothing that it depended on differs.

    The first dimension of the buffers is the dynamic one. `num_tokens` should be near the largest that will occur and
    no other dimension's size: compiled code may assume upper bounds that hold for it, and sizes that are equal while
    tracing may be taken for one. `launches_of`: see `compile_graph`. RuntimeError for a model that Dynamo cannot trace
    whole, naming the line.
    """
    views = [buffer[:num_tokens] for buffer in buffers]
    started = time.perf_counter()
    cache = TraceCache(model, views, options, globals()) if options.cache and options.compiler == "inductor" else None
    # Who looks on (a dump) wants to see the graphs, which a program on disk no longer has.
    traced = cache.find() if cache is not None and not observers else None
    source = "disk" if traced is not None else "traced"
    if traced is None:
        traced = _trace_anew(model, views, num_tokens, options, cache, launches_of)
    report = traced.report
    report.program_source, report.program_seconds = source, time.perf_counter() - started
    report.reasons.extend(cache.reasons if cache is not None else ())
    return _bind(traced, views, buffers)


def _bind(traced: Traced, views: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> BoundProgram:
    """What was traced on `views`, with `buffers` in their place."""
    program, args = traced.program, traced.args
    full = {view.data_ptr(): buffer for view, buffer in zip(views, buffers, strict=True)}
    dim = program.token_dim
    varying = tuple(
        i for i, given in enumerate(program.inputs) if isinstance(given.fake, torch.SymInt) or dim.dims(given.fake)
    )
    bound = tuple(full[a.data_ptr()] if isinstance(a, torch.Tensor) and i in varying else a for i, a in enumerate(args))
    return BoundProgram(program, traced.report, dim, bound, varying)


def _trace_anew(
    model: nn.Module,
    views: Sequence[torch.Tensor],
    num_tokens: int,
    options: Options,
    cache: TraceCache | None,
    launches_of: Callable[[Operands], Sequence[Launch]] | None,
) -> Traced:
    """Trace and compile; `cache`, where given, looks on and keeps the program."""
    caught: list[tuple[Program, Report, Sequence[int | Merged]]] = []
    calls: list[tuple[Any, ...]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _check_layers_used_once(gm)
        if cache is not None:
            cache.note_graph(gm)
        sources: Sequence[int | Merged] = range(len(example_inputs))
        if options.merge_linears:
            gm, sources = merge_linears(gm, example_inputs)
        program, report = compile_graph(gm, options, launches_of)
        caught.append((program, report, sources))

        def first_call(*args: Any) -> tuple[Any, ...]:
            """Nobody reads the results of the traced call, so nothing is computed."""
            calls.append(tuple(s.tensor if isinstance(s, Merged) else args[s] for s in sources))
            dim = program.token_dim
            return tuple(dim.empty(f, num_tokens) if isinstance(f, torch.Tensor) else f for f in program.output_fakes)

        return first_call

    for view in views:
        torch._dynamo.mark_dynamic(view, 0)
    start_compile_workers(options.compiler, views[0].device)
    state = plain_state(model)
    guard_filter = torch.compiler.skip_all_guards_unsafe if cache is None else cache.guard_filter
    compiled = torch.compile(
        _caller_of(model), backend=backend, fullgraph=True, options={"guard_filter_fn": guard_filter}
    )
    try:
        with torch.no_grad(), torch._dynamo.config.patch(run_gc_after_compile=False):
            compiled(*views)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None  # ours, and clear by itself
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        raise RuntimeError(_graph_break_message(error)) from error
    assert len(caught) == 1, f"one trace must serve every size, got {len(caught)}"
    (program, report, sources), (args,) = caught[0], calls
    report.reasons.extend(fixed_state(state, model))
    traced = Traced(program, report, args)
    if cache is not None:
        cache.keep(traced, sources)
    return traced


_CACHE_OF = {"attention": 1, "compressed_attention": 1, "linear_attention": 5, "short_conv": 3, "compress_kv": 3}
"""By operator of a layer with caches: which of its arguments is the cache."""


def _check_layers_used_once(gm: torch.fx.GraphModule) -> None:
    """A layer's cache holds one entry for each token, so a second call in one pass would overwrite the first's."""
    seen: set[Any] = set()
    for node in gm.graph.nodes:
        qualified = target_names(node.target)[-1] if node.op == "call_function" else ""
        namespace, _, name = qualified.partition("::")
        if namespace != "mrv2" or name not in _CACHE_OF:
            continue
        cache = node.args[_CACHE_OF[name]]
        if (name, cache) in seen:
            raise ValueError(
                f"a layer is called twice in one forward ({name} on {cache}): both calls would share one cache. Make a "
                "layer object for each call; they may share the weights around them"
            )
        seen.add((name, cache))


def _caller_of(model: nn.Module) -> Callable[..., Any]:
    """A function that calls `model`, with a code object of its own: Dynamo counts recompilations by code object, and
    any number of runners may be started in one process."""

    def call(*args: Any) -> Any:
        return model(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


_RAISED = re.compile(r"raised exception (\w+)\(\D*?(?:str: )?(['\"])(.*)\2")
"""What Dynamo says of an exception that the traced code itself raises."""


def _graph_break_message(error: Exception) -> str:
    if (raised := _RAISED.search(str(error))) is not None:
        return f"the model raises {raised[1]} while it is traced, at {_user_line(error)}: {raised[3]}"
    what = str(error).strip().splitlines()[0]
    return (
        f"the model cannot be traced as one graph: {what} At {_user_line(error)}. A model for the runner must stay in "
        "one graph: move this line out of forward, or make it an operator with torch.library.custom_op and register "
        "that with register_breakpoint"
    )


def _user_line(error: Exception) -> str:
    """ "file:line: code" of the innermost line of the user's that Dynamo was at, layers of ours left out."""
    stack = getattr(error, "real_stack", None)
    if stack:
        frame = next((f for f in reversed(stack) if f.filename != layers.__file__), stack[-1])
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    lines = str(error).partition("from user code:")[2].splitlines()
    frames = [(place, code) for place, code in itertools.pairwise(lines) if place.strip().startswith("File ")]
    if not frames:
        return "an unknown line"
    place, code = frames[-1]
    name, number = place.strip().removeprefix("File ").split(", ")[:2]
    return f"{name.strip(chr(34))}:{number.removeprefix('line ')}: {code.strip()}"
