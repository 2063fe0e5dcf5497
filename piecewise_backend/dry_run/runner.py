"""The dry run of a model made of attention layers, as the runner captures it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from attention.kv_cache import block_bytes, state_bytes
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.dry_run.breaks import break_finding
from piecewise_backend.dry_run.explanation import Explanation, Finding, GraphFacts, MemoryFacts, SizeFacts
from piecewise_backend.dry_run.findings import FIXED_HINT, fixed_finding, of_fixed_dim, of_reasons
from piecewise_backend.dry_run.memory import LiveBytes
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import ModelRunner, RunnerConfig
from piecewise_backend.runner.batch import InputBatch

_PADDING = "bucketed: padded tokens have no slot in any cache. That no other line mixes tokens is not tried here"
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
_FAKE_RUN = re.compile(r"with fake tensors: call_\w+ (?:<[^>]*?(?:function|method|op) '?(?P<op>[\w.]+)|(?P<name>\w+))")
_LENGTH = 64
_HINT = "the runner needs the model in one graph: move this line out of forward, or make it an operator of its own"


def dry_run_runner(model: nn.Module, options: Options, device: torch.device) -> Explanation:
    """Start a small runner for `model`, which is given to it for good: nothing is computed but dummy batches."""
    assert options.capture_sizes is not None, "a runner's dry run is told its sizes"
    largest = max(options.capture_sizes)
    config = RunnerConfig(max_num_tokens=max(largest, 4), max_num_reqs=largest, max_model_len=_LENGTH)
    runner = ModelRunner(model.to(device), config, options, device)
    findings: list[Finding] = []
    try:
        runner.start()
    except (RuntimeError, ValueError) as error:
        findings = [_refusal(error, runner)]
    started = not findings
    if started:
        findings = list(of_reasons((reason for reason, _ in runner.report.reasons), runner.bound.program))
    return Explanation(
        model=type(model).__name__,
        kind="runner",
        device=str(device),
        compiler=options.compiler,
        mode_requested=options.mode,
        mode_resolved=runner.report.mode_resolved if started else "NONE",
        sizes_tried=options.capture_sizes,
        findings=tuple(findings),
        graphs=(_graph_facts(runner),) if started else (),
        memory=_memory(runner, started),
        notes=("attention backends of this device were asked; on another device others may be chosen",),
    )


def _refusal(error: RuntimeError | ValueError, runner: ModelRunner) -> Finding:
    """What kept the model from being traced; anything else is raised again."""
    if isinstance(error, ValueError) and "is marked dynamic" in str(error):
        args = [runner.buffers.input_ids.gpu[:-1], runner.buffers.positions.gpu[:-1]]
        found = of_fixed_dim(runner.model, args, args, 0)
        return found[0] if found else fixed_finding(str(error))
    if isinstance(error, TorchRuntimeError):
        return _failing_operator(error)
    if isinstance(error.__cause__, TorchDynamoException):
        return dataclasses.replace(break_finding(*_place(error.__cause__), str(error.__cause__)), hint=_HINT)
    raise error


def _failing_operator(error: TorchRuntimeError) -> Finding:
    """An operator that fails on tensors whose first dimension may be any: it expects one size."""
    found = break_finding(*_place(error), str(error))
    op = _FAKE_RUN.search(str(error))
    name = (op["op"] or op["name"]) if op is not None else found.op
    why = found.why.partition("got RuntimeError(")[2].strip("'\"). ") or found.why
    return dataclasses.replace(
        found,
        code=ReasonCode.SIZE_FIXED,
        op=name,
        why=f"it fails where the number of tokens may be any: {why}",
        hint=FIXED_HINT,
    )


def _place(error: Any) -> tuple[str, int]:
    """(file, line) of the innermost line of the user's that Dynamo was at."""
    if stack := getattr(error, "real_stack", None):
        return stack[-1].filename, stack[-1].lineno or 0
    found = _FRAME.findall(str(error).partition("from user code:")[2])
    return (found[-1][0], int(found[-1][1])) if found else ("an unknown file", 0)


def _graph_facts(runner: ModelRunner) -> GraphFacts:
    report, program = runner.report, runner.bound.program
    return GraphFacts(
        name=report.name,
        num_pieces=report.num_pieces,
        breakpoints=tuple(step.breakpoint.name for step in program.breakpoints if step.breakpoint is not None),
        sizes=tuple(
            SizeFacts(
                descriptor=size.descriptor,
                num_rows=size.num_tokens,
                bucketed=True,
                num_graphs=size.num_graphs,
                between=size.eager_ops,
            )
            for size in report.sizes
        ),
        padding=_PADDING if report.sizes else "not tried: nothing was captured",
    )


def _memory(runner: ModelRunner, started: bool) -> MemoryFacts:
    caches = runner.num_blocks * block_bytes(runner.specs) + runner.config.max_num_reqs * state_bytes(runner.specs)
    return MemoryFacts(
        static_buffers=runner.buffers.input_ids.gpu.untyped_storage().nbytes(),
        graph_pool=_peak_bytes(runner) if started else 0,
        graph_pool_at_most=sum(size.memory_bytes for size in runner.report.sizes) if started else 0,
        caches=caches,
    )


def _peak_bytes(runner: ModelRunner) -> int:
    """Of a dummy batch of the largest size: inert slots, so no cache is written."""
    config = runner.config
    none = BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=config.max_num_tokens)
    batch = InputBatch.make_dummy(none, max_num_reqs=config.max_num_reqs, max_model_len=config.max_model_len)
    with LiveBytes() as live:
        runner.forward(batch, none)
    return live.peak
