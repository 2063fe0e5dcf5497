"""The dry run of a model as `torch.compile(model, backend="mrv2")` calls it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from piecewise_backend.config import Options
from piecewise_backend.cudagraph.rows import span
from piecewise_backend.dry_run.breaks import line_of, listening
from piecewise_backend.dry_run.explanation import Explanation, Finding, GraphFacts, MemoryFacts, SizeFacts
from piecewise_backend.dry_run.findings import of_failing_size, of_fixed_dim, of_reasons, split_line
from piecewise_backend.dry_run.inputs import Resized
from piecewise_backend.dry_run.memory import LiveBytes
from piecewise_backend.dry_run.mixing import first_mixing_operator
from piecewise_backend.dry_run.traces import KeepingBackend, Traced, caller_of, is_retraced_each_size, latest
from piecewise_backend.plain import PlainCaller
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.reporting.report import Report

logger = logging.getLogger(__name__)

_ARGUMENT = re.compile(r"l_args_(\d+)_")
_MIXING_HINT = "rows of a batch must not depend on each other, if small batches are to be padded"
_ON_CPU = "on the CPU, copies between host and device cannot be told from others: they are found on a GPU only"


def dry_run_plain(model: Callable[..., Any], resized: Resized, options: Options, device: torch.device) -> Explanation:
    """Call `model` compiled at several sizes. ValueError where it fails uncompiled on the inputs given."""
    sizes = options.capture_sizes or ()
    counts = counts_of(sizes) if resized.count else [0]
    failing = of_failing_size(model, resized.at(resized.count), resized.count)
    if failing is not None:
        where = f" (at {failing.place})" if failing.place else ""
        why = failing.why.partition(": ")[2]
        raise ValueError(f"the model fails on these inputs before anything is compiled: {why}{where}")
    findings = []
    wrong = next((f for c in counts if (f := of_failing_size(model, resized.at(c), c)) is not None), None)
    if wrong is not None:
        findings = _fixed(model, resized, counts[0]) or [wrong]
        counts = [resized.count]
    backend = KeepingBackend(options)
    findings += _call(model, resized, counts, backend)
    if wrong is None and is_retraced_each_size(backend.traced, counts):
        findings += _fixed(model, resized, counts[0])
    kept = latest(backend.traced)
    for traced in kept:
        found = of_reasons((reason for reason, _ in traced.report.reasons), traced.program)
        findings += [_with_operator(one, traced) if one.code is ReasonCode.CROSS_ROW else one for one in found]
    peak = _peak_bytes(model, resized.at(max(counts)))
    explanation = Explanation(
        model=_name(model),
        kind="plain",
        device=str(device),
        compiler=options.compiler,
        mode_requested=options.mode,
        mode_resolved=kept[0].report.mode_resolved if kept else "NONE",
        sizes_tried=tuple(sorted(set(counts) - {0})),
        findings=tuple(dict.fromkeys(_with_own_names(finding, model) for finding in findings)),
        graphs=tuple(_graph_facts(traced) for traced in kept),
        memory=_memory(kept, peak, max(counts)),
        notes=tuple(_notes(device, options)),
    )
    backend.forget()
    return explanation


def counts_of(sizes: Sequence[int]) -> list[int]:
    """Calls that show what becomes of each size: whole, with a padded row, and whole again."""
    counts: list[int] = []
    for size in sorted(sizes, reverse=True):
        counts += [size, size - 1, size] if size > 2 else [size]
    if len(set(counts)) < 3 and (smaller := max(counts) - 2) > 1:  # a model of one size is traced anew at each
        counts.append(smaller)
    return counts


def _call(model: Callable[..., Any], resized: Resized, counts: Sequence[int], backend: KeepingBackend) -> list[Finding]:
    """Findings of calling the compiled model: graph breaks, and an error that compiling it is."""
    failed: list[Finding] = []
    # Code objects may be those of models that were compiled before, whose traces count against the limit.
    limits = torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096)
    compiled = torch.compile(caller_of(model), backend=backend)
    with limits, listening() as listener, torch.no_grad():
        for backend.count in counts:
            try:
                compiled(*resized.at(backend.count))
            except Exception as error:
                failed.append(_failure(error))
                break
    return [*listener.findings.values(), *failed]


def _with_operator(finding: Finding, traced: Traced) -> Finding:
    """The same finding with the operator and line that mix rows, where running the graph again finds them."""
    if traced.program.is_random or any(given.is_written for given in traced.program.inputs):
        return finding
    padded = [count for count in traced.calls if count > 1]
    try:
        count = min(padded)
        found = first_mixing_operator(traced.gm, traced.program.token_dim, traced.calls[count], count)
    except Exception as error:  # a graph that does not run on padded rows says so in the finding already
        logger.debug("%s: no operator found: %s", traced.name, error)
        found = None
    if found is None:
        return finding
    place, source = split_line(found[1])
    return dataclasses.replace(finding, op=found[0], place=place, source=source, hint=finding.hint or _MIXING_HINT)


def _with_own_names(finding: Finding, model: Callable[..., Any]) -> Finding:
    """The same with inputs called as the model calls them: the dry run hands them over as `*args`."""
    names = _parameter_names(model)

    def renamed(text: str) -> str:
        return _ARGUMENT.sub(lambda m: names[int(m[1])] if int(m[1]) < len(names) else m[0], text)

    return dataclasses.replace(finding, op=renamed(finding.op), why=renamed(finding.why), hint=renamed(finding.hint))


def _parameter_names(model: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model).parameters)
    except ValueError:  # a builtin without a signature
        return []


def _failure(error: Exception) -> Finding:
    inner = getattr(error, "inner_exception", error)
    place, source = line_of(inner)
    lines = str(inner).strip().splitlines() or [type(inner).__name__]
    return Finding(
        code=ReasonCode.CAPTURE_FAILED,
        op=type(inner).__name__,
        place=place,
        source=source,
        why=lines[0],
        hint="it fails in the same way under torch.compile; without compiling it runs",
    )


def _fixed(model: Callable[..., Any], resized: Resized, count: int) -> list[Finding]:
    args = resized.at(resized.count if resized.count > 1 else count)
    marked = [value for value, varies in zip(args, resized.varying, strict=True) if varies]
    return of_fixed_dim(model, args, marked, resized.dim)


def _graph_facts(traced: Traced) -> GraphFacts:
    report, program = traced.report, traced.program
    is_exact = any(reason.code is ReasonCode.CROSS_ROW for reason, _ in report.reasons)
    sizes = tuple(
        SizeFacts(
            descriptor=size.descriptor,
            num_rows=size.num_tokens,
            bucketed=bool(size.num_tokens) and not is_exact and "exactly" not in size.descriptor,
            num_graphs=size.num_graphs,
            between=size.eager_ops,
        )
        for size in sorted(report.sizes, key=lambda s: (s.num_tokens, s.descriptor))
    )
    return GraphFacts(
        name=traced.name,
        num_pieces=report.num_pieces,
        breakpoints=tuple(step.breakpoint.name for step in program.breakpoints if step.breakpoint is not None),
        sizes=sizes,
        padding=_padding(report, sizes, bool(program.token_dim)),
    )


def _padding(report: Report, sizes: Sequence[SizeFacts], is_dynamic: bool) -> str:
    for reason, _ in report.reasons:
        if reason.code in (ReasonCode.CROSS_ROW, ReasonCode.SEVERAL_DYNAMIC_DIMS):
            return f"exact: {reason.detail}"
    if not is_dynamic:
        return "not tried: this graph has fixed sizes"
    if any(size.bucketed for size in sizes):
        return "bucketed: every real row came out the same to the bit, whatever the padded rows held"
    return "exact: no call was padded" if sizes else "not tried: nothing was captured"


def _memory(kept: Sequence[Traced], peak: int, count: int) -> MemoryFacts:
    return MemoryFacts(
        static_buffers=sum(_static_bytes(traced, count) for traced in kept),
        graph_pool=peak,
        graph_pool_at_most=sum(size.memory_bytes for traced in kept for size in traced.report.sizes),
    )


def _static_bytes(traced: Traced, count: int) -> int:
    """Bytes of the buffers that calls are copied into."""
    if not isinstance(traced.caller, PlainCaller):
        return 0
    fakes = [traced.program.inputs[index].fake for index in traced.caller.copied]
    layouts = [(traced.program.token_dim.layout(fake, count), fake.dtype.itemsize) for fake in fakes]
    return sum(span(sizes, strides) * width for (sizes, strides, _), width in layouts)


def _peak_bytes(model: Callable[..., Any], args: Sequence[Any]) -> int:
    with torch.no_grad(), LiveBytes() as live:
        model(*args)
    return live.peak


def _notes(device: torch.device, options: Options) -> Iterator[str]:
    if device.type == "cpu":
        yield _ON_CPU
    if options.compiler == "eager":
        yield "pieces run as traced (compiler 'eager', for speed): Inductor fuses operators, so it needs less memory"


def _name(model: Any) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))
