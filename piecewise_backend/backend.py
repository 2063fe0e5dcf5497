"""`torch.compile(model, backend="mrv2")`: the whole pipeline on one page."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attention.kernels.ahead import Launch
from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.collector import collector_paused
from piecewise_backend.compile import PieceCompiler, forget_compiled_pieces
from piecewise_backend.config import Options, parse_options
from piecewise_backend.cudagraph.cuda import CudaGraphRecorder
from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.cudagraph.sizes import clean_capture_sizes, default_capture_sizes
from piecewise_backend.dumping.dump import dump_if_asked
from piecewise_backend.dynamic import check_marked_dims, specialize_floats
from piecewise_backend.facts import find_facts
from piecewise_backend.inline import inline_subgraphs
from piecewise_backend.names import first_of
from piecewise_backend.observe import tell
from piecewise_backend.origin import current_origin
from piecewise_backend.plain import PlainCaller
from piecewise_backend.program import Operands, Program, build_program, needs_grad, operands_of_layers
from piecewise_backend.reasons import Reason, ReasonCode, Reasons
from piecewise_backend.reporting.report import Report
from piecewise_backend.reporting.steps import describe_steps
from piecewise_backend.split import split
from piecewise_backend.structured_trace import trace_program, trace_resolution

logger = logging.getLogger(__name__)

_callers: list[weakref.ref[Any]] = []
"""The compiled functions that are alive, oldest first."""


def mrv2(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that `torch.compile` finds by name.

    Returns a function with the `Program` as its attribute `program` and the `Report` as `report`. ValueError for
    options or operators that do not exist, RuntimeError for a graph that needs grad.
    """
    parsed = parse_options(options, mode)
    program, report = compile_graph(gm, parsed)
    recorder = choose_recorder(parsed, _device_of(example_inputs), report)
    report.reasons.extend(_obstacles(program, recorder))
    if recorder is None or ReasonCode.INPUT_NOT_STATIC in report.reasons.codes():
        report.mode_resolved = "NONE"
        return _as_function(_without_graphs(program, report), program, report)
    sizes = clean_capture_sizes(parsed.capture_sizes) if parsed.capture_sizes else default_capture_sizes()
    report.capture_sizes = sizes if program.token_dim else ()
    return _as_function(PlainCaller(program, gm, parsed, recorder, report, sizes), program, report)


@collector_paused()
def compile_graph(
    gm: fx.GraphModule, options: Options, launches_of: Callable[[Operands], Sequence[Launch]] | None = None
) -> tuple[Program, Report]:
    """Split, inspect and compile a Dynamo graph: everything but capturing.

    `launches_of`: from the operands of attention layers to launches whose kernels are compiled meanwhile.
    """
    if names := needs_grad(gm):
        raise RuntimeError(
            f"mrv2 compiles for inference only, and output {names[0]!r} of this graph needs grad. {_way_out_of_grad()}"
        )
    dump_if_asked()
    started = time.perf_counter()
    reasons = Reasons(on_fallback=options.on_fallback)
    check_marked_dims(gm)
    specialize_floats(gm)
    gm = inline_subgraphs(gm)
    graph = split(gm, find_breakpoints(options.splitting_ops))
    tell(lambda observer: observer.split(gm, graph))
    facts = find_facts(gm, graph)
    compiler = PieceCompiler.from_options(options, reasons)
    try:
        if launches_of is not None:
            compiler.kernels.compile(launches_of(operands_of_layers(graph)))
        program = build_program(gm, graph, facts, compiler)
    finally:
        compiler.kernels.wait()
    compiled = {p.key: p for p in program.pieces}
    pieces = [compiled.get(compiler.key(segment.structure)) for segment in graph.segments]
    steps, structures = describe_steps(graph.segments, program.steps, pieces)
    reasons.extend(_uncapturable_pieces(program))
    report = Report(
        name=_name_of(gm),
        mode_requested=options.mode,
        mode_resolved=options.mode,
        recorder="none",
        num_pieces=program.num_pieces,
        num_breakpoints=len(program.breakpoints),
        compiled={p.key: p.source for p in program.pieces},
        compile_seconds=time.perf_counter() - started,
        steps=steps,
        structures=structures,
        reasons=reasons,
    )
    logger.info("%s: %d pieces, %d distinct", report.name, program.num_pieces, len(program.pieces))
    trace_program(program, report)
    tell(lambda observer: observer.compiled(program, report))
    return program, report


def _way_out_of_grad() -> str:
    if torch.is_grad_enabled():
        return "Call the model under torch.no_grad() or torch.inference_mode(), or set model.requires_grad_(False)"
    return "The model itself switches grad on: take torch.enable_grad() out of it, or set model.requires_grad_(False)"


def choose_recorder(options: Options, device: torch.device, report: Report) -> GraphRecorder | None:
    """What records for `device`; None, with a reason in the report, where nothing does."""
    if CUDAGraphMode.parse(options.mode) is CUDAGraphMode.NONE or options.recorder == "none":
        return None
    recorder: GraphRecorder | None = None
    if options.recorder == "emulated":
        recorder = EmulatedRecorder(poison=options.poison)
    elif device.type == "cuda":
        recorder = _cuda_recorder(device)
    elif options.recorder == "cuda":
        raise ValueError(f"recorder 'cuda' needs tensors on a CUDA device, got {device}; allowed here: emulated, none")
    if recorder is None:
        report.reasons.add(
            Reason(
                ReasonCode.NO_RECORDER,
                f"mode {options.mode}",
                f"no CUDA graphs on {device}: resolved to NONE",
                "options={'recorder': 'emulated'} checks capture logic on any device",
            )
        )
    else:
        report.recorder = recorder.name
    return recorder


_cuda_recorders: dict[torch.device, CudaGraphRecorder] = {}


def _cuda_recorder(device: torch.device) -> CudaGraphRecorder:
    """One pool and one capture stream per device."""
    if device not in _cuda_recorders:
        _cuda_recorders[device] = CudaGraphRecorder(device)
    return _cuda_recorders[device]


def reports() -> list[Report]:
    """Reports of every graph compiled in this process whose compiled function is still alive."""
    return [function.report for function in alive_functions()]


def alive_functions() -> list[Any]:
    """What `mrv2` returned and something still holds, oldest first."""
    return [function for ref in _callers if (function := ref()) is not None]


Watcher = Callable[[Program, Report, Callable[..., Any], tuple[Any, ...]], tuple[Any, ...]]
"""(program, report, what would be called, arguments) to results."""

_watch: tuple[int, Watcher] | None = None


@contextlib.contextmanager
def calls_go_to(watcher: Watcher) -> Iterator[None]:
    """While open, calls of compiled graphs on this thread go to `watcher` instead."""
    global _watch
    outer, _watch = _watch, (threading.get_ident(), watcher)
    try:
        yield
    finally:
        _watch = outer


def reset() -> None:
    """Forget every compiled graph: as `torch.compiler.reset()`, the reports and the compiled pieces too."""
    torch.compiler.reset()
    forget_compiled_pieces()
    _callers[:] = []


def _forget(ref: weakref.ref[Any]) -> None:
    if ref in _callers:
        _callers.remove(ref)


def _without_graphs(program: Program, report: Report) -> Callable[..., Any]:
    def call(*args: Any) -> tuple[Any, ...]:
        report.uncaptured_runs += 1
        return program.run(args)

    return call


def _as_function(call: Callable[..., Any], program: Program, report: Report) -> Callable[..., Any]:
    """A plain function: debuggers of compiled code read its `__code__`."""

    def mrv2_compiled(*args: Any) -> Any:
        if (watch := _watch) is not None and watch[0] == threading.get_ident():
            return watch[1](program, report, call, args)
        if torch.is_grad_enabled():  # nothing here needs it, and an eager operator would keep what its backward needs
            with torch.no_grad():
                return call(*args)
        return call(*args)

    trace_resolution(report)
    tell(lambda observer: observer.started(report))
    mrv2_compiled.program = program  # type: ignore[attr-defined]
    mrv2_compiled.report = report  # type: ignore[attr-defined]
    mrv2_compiled.caller = call  # type: ignore[attr-defined]
    mrv2_compiled.origin = current_origin()  # type: ignore[attr-defined]
    _callers.append(weakref.ref(mrv2_compiled, _forget))
    return mrv2_compiled


def _uncapturable_pieces(program: Program) -> list[Reason]:
    """One reason for each operator and line, however many pieces it is in."""
    pieces: dict[str, list[str]] = {}
    for step in program.steps:
        if step.forbidden is not None:
            pieces.setdefault(str(step.forbidden), []).append(step.name)
    hint = "keep it out of the model, or register the operator as a breakpoint"
    return [Reason(ReasonCode.PIECE_NOT_CAPTURABLE, first_of(names), what, hint) for what, names in pieces.items()]


def _obstacles(program: Program, recorder: GraphRecorder | None) -> list[Reason]:
    """Inputs that no graph can be given a fixed address for; one reason for each kind."""
    if recorder is None:
        return []
    on_device = any(isinstance(i.fake, torch.Tensor) and i.fake.device.type != "cpu" for i in program.inputs)
    inputs: dict[str, list[str]] = {}
    for given in program.inputs:
        if (why := _why_not_static(given.fake, on_device)) is not None:
            inputs.setdefault(why, []).append(given.name)
    hint = "pass it as a tensor on the model's device"
    return [
        Reason(ReasonCode.INPUT_NOT_STATIC, first_of(names), f"{why}: this graph runs without graphs", hint)
        for why, names in inputs.items()
    ]


def _why_not_static(fake: Any, on_device: bool) -> str | None:
    if not isinstance(fake, torch.Tensor):
        return None if isinstance(fake, torch.SymInt | int) else f"a {type(fake).__name__} is not a tensor"
    if fake.device.type == "cpu" and on_device:
        return "a host tensor among device tensors would be baked in as a number"
    return None if fake.layout is torch.strided else f"a {fake.layout} tensor has no single address"


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = [v.device for v in example_inputs if isinstance(v, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))


def _name_of(gm: fx.GraphModule) -> str:
    """The user's function, from the first line that made a node."""
    for node in gm.graph.nodes:
        for line in node.meta.get("stack_trace", "").splitlines():
            if line.strip().startswith("File "):
                return line.strip().removeprefix("File ").replace('"', "").replace(", line ", ":")
    return "graph"
