"""One piece of a compiled model as a script of its own, to be sent to whoever can repair it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piecewise_backend.backend import alive_functions
from piecewise_backend.breakpoints import target_names
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.lookup import report
from piecewise_backend.piece_code import readable_code
from piecewise_backend.plain import PlainCaller
from piecewise_backend.program import Program, Traced
from piecewise_backend.repro.arguments import Arguments
from piecewise_backend.repro.template import SCRIPT
from piecewise_backend.runner.llm import LLM
from piecewise_backend.runner.model_runner import ModelRunner

_ROWS = (11, 13, 17, 19, 23, 29, 31)
"""Sizes of the dynamic dimension to choose from: one that is no other dimension's, or tracing may take both for one."""
_LARGEST_LITERAL = 64
"""Elements up to which a constant is written out; a larger one is random."""


def write_repro(compiled: Any, piece: int | str, path: str | Path, *, rows: int | None = None) -> Path:
    """Write a script that runs one piece of `compiled` alone; returns its path.

    compiled: what `torch.compile(model, backend="mrv2")` returned, an `LLM` or a `ModelRunner`. piece: the step's
    number or name ("piece 2"), or the beginning of a compiled piece's key. rows: the size of the dynamic dimension;
    None: one that no other dimension has.

    The script makes inputs (parameters too) of the traced dtypes, shapes, strides and shared memory, random but the
    same at every run; integers are 0 or 1. It compiles the piece as it was compiled here, records and replays it, and
    compares all of it with eager; exit status 0 if they agree, else 1. ValueError for a step that does not exist or
    that cannot run alone: an operator that needs a batch's metadata, a program that came from disk without its graph.
    """
    program, subject, options = _program_of(compiled)
    index = _index_of(program, piece)
    if index >= len(program.traced):
        raise ValueError(
            f"there is no graph of {program.steps[index].name!r}: the program came from disk; start with "
            "options={'cache': False}, then write the script"
        )
    step, traced = program.steps[index], program.traced[index]
    _check_runs_alone(step, traced)
    path = Path(path)
    text = _script(program, step, traced, subject, options, rows or _free_size(step))
    path.write_text(text, encoding="utf-8")
    return path


def _program_of(compiled: Any) -> tuple[Program, str, Options]:
    runner = compiled.runner if isinstance(compiled, LLM) else compiled
    if isinstance(runner, ModelRunner):
        return runner.bound.program, type(runner.model).__name__, runner.options
    found = report(compiled)
    function = next(f for f in alive_functions() if f.report is found)
    options = function.caller.options if isinstance(function.caller, PlainCaller) else Options()
    return function.program, found.name, options


def _index_of(program: Program, piece: int | str) -> int:
    names = [step.name for step in program.steps]
    if isinstance(piece, int) and 0 <= piece < len(names):
        return piece
    if piece in names:
        return names.index(str(piece))
    for index, traced in enumerate(program.traced):
        if isinstance(piece, str) and traced.compiled is not None and traced.compiled.key.startswith(piece):
            return index
    allowed = f"0 to {len(names) - 1}, a piece's key, or {', '.join(names)}"
    raise ValueError(f"there is no piece {piece!r}; allowed: {allowed}")


def _free_size(step: Step) -> int:
    shapes = [fake.shape for fake in step.input_fakes if isinstance(fake, torch.Tensor)]
    taken = {size for shape in shapes for size in shape if isinstance(size, int)}
    return next((rows for rows in _ROWS if rows not in taken), _ROWS[-1])


def _check_runs_alone(step: Step, traced: Traced) -> None:
    why = None
    for node in traced.segment.module.graph.nodes:
        names = target_names(node.target) if node.op == "call_function" else ()
        if any(isinstance(a, str) for a in node.args) and names and names[-1].startswith("mrv2::"):
            why = f"{names[-1]} needs a batch's metadata"
        is_constant = node.op == "get_attr" and isinstance(_constant(traced, node), torch.Tensor)
        if node.op in ("call_module", "get_attr") and not is_constant:
            why = f"{node.target} is a graph or module of its own"
    if why is not None:
        raise ValueError(f"{step.name!r} cannot run alone: {why}; allowed: pieces of operators on tensors")


def _script(program: Program, step: Step, traced: Traced, subject: str, options: Options, rows: int) -> str:
    imports, _, code = readable_code(traced.segment.module).partition("class GraphModule")
    arguments = Arguments(step, program.token_dim, rows)
    constants = [n for n in traced.segment.module.graph.nodes if n.op == "get_attr"]
    return SCRIPT.format(
        name=step.name,
        subject=subject.replace("\\", "/"),
        torch=torch.__version__,
        imports="\n".join([imports.strip(), *_operator_imports(traced)]),
        options=_options(traced, options),
        dynamic=arguments.dynamic,
        constants="".join(f"    {str(n.target)!r}: {_literal(_constant(traced, n))},\n" for n in constants),
        code=f"class GraphModule{code}".strip(),
        function=_function(arguments, traced),
        memories="\n".join(arguments.memories()) or "    pass",
        arguments="\n".join(f"        {text}," for text in arguments.tensors()),
    )


def _options(traced: Traced, options: Options) -> dict[str, Any]:
    """What compiles the piece as here; a size is recorded at its first call, and nothing is kept."""
    source = "eager" if traced.compiled is None else traced.compiled.source
    return {
        "compiler": "inductor" if source == "disk" else source,
        "compiler_options": dict(options.compiler_options),
        "fast_pieces": options.fast_pieces,
        "recorder": "auto" if options.recorder == "none" else options.recorder,
        "capture_after": 1,
        "cache": False,
    }


def _function(arguments: Arguments, traced: Traced) -> str:
    """The piece as a function of tensors alone, so that its sizes are as dynamic as they were."""
    sizes = [f"    {name} = {value}" for name, value in arguments.sizes()]
    return "\n".join(
        [
            "MODULE = GraphModule()",
            "for name, value in CONSTANTS.items():",
            "    setattr(MODULE, name, value)",
            "",
            "",
            f"def piece({', '.join(t.name for t in arguments.given)}):",
            *sizes,
            f"    return MODULE({', '.join(name for name, _ in arguments.all)})",
        ]
    )


def _operator_imports(traced: Traced) -> list[str]:
    """Imports that register the operators of the piece."""
    found: dict[str, None] = {}
    for node in traced.segment.module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            name = target_names(node.target)[-1]
            if name.startswith("mrv2::"):
                found["import attention.layers"] = None
            elif not name.startswith(("aten::", "prims::")):
                found[_import_of_operator(name)] = None
    return list(found)


def _import_of_operator(name: str) -> str:
    defined = torch._library.custom_ops.OPDEFS.get(name)
    module = getattr(getattr(defined, "_init_fn", None), "__module__", None)
    if module in (None, "__main__"):
        file = getattr(sys.modules.get("__main__"), "__file__", "a script") if module else "unknown to Python"
        return f"# {name} must be registered here: it is defined in {file}, which cannot be imported"
    return f"import {module}  # registers {name}"


def _constant(traced: Traced, node: fx.Node) -> Any:
    found: Any = traced.segment.module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _literal(value: torch.Tensor) -> str:
    if value.numel() <= _LARGEST_LITERAL:
        return f'torch.tensor({value.tolist()}, dtype={value.dtype}, device="{value.device}")'
    random = f"torch.randn({tuple(value.shape)}, generator=torch.Generator().manual_seed(0))"
    return f'{random}.to("{value.device}", {value.dtype})'
