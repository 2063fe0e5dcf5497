"""`mrv2 bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from piecewise_backend.cli.target import load_target
from piecewise_backend.cli.values import dtype_named

_CONTENDERS = ("eager", "inductor", "reduce-overhead", "NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
_WHAT = """Compares eager, torch's compilers and mrv2 in its modes. Outputs are checked against eager first: a wrong
contender gets no time, and the exit status is 1. Times are of one run, in rounds that go through all contenders."""


def add_to(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    bench = commands.add_parser("bench", help="time a model eager, compiled, and in mrv2's modes", description=_WHAT)
    bench.add_argument("target", help="module:factory or file.py:factory; or a model folder, a .gguf file, or smollm2")
    bench.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE:DTYPE",
        help="such as 8x64:float32; once for each input",
    )
    bench.add_argument(
        "--contenders", nargs="+", choices=_CONTENDERS, default=None, help="default: what the device has"
    )
    bench.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    bench.add_argument("--dtype", default=None, help="of a language model: float32, float16 or bfloat16")
    bench.add_argument("--compiler", default="inductor", help="what compiles mrv2's pieces (default %(default)s)")
    bench.add_argument(
        "--recorder", default=None, help="emulated checks graphs without a GPU (their time is not given)"
    )
    bench.add_argument("--options", type=json.loads, default={}, help="more of mrv2's options, as JSON")
    bench.add_argument("--rounds", type=int, default=15, help="timed rounds (default %(default)s)")
    bench.add_argument("--warmup", type=int, default=3, help="rounds before them (default %(default)s)")
    bench.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="of a language model (default 1 8)")
    bench.add_argument("--context", type=int, default=128, help="tokens of each prompt (default %(default)s)")
    bench.add_argument("--steps", type=int, default=4, help="decode steps of a round (default %(default)s)")
    bench.add_argument("--attention-backend", default=None, help="force one (default: the best that works)")
    bench.add_argument("--vocab-size", type=int, default=None, help="of a model without a config")
    bench.add_argument(
        "--out", type=Path, default=None, metavar="FOLDER", help="write bench_*.json, .md and .png there"
    )
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write: 0, or 1 where an output is wrong or a contender failed."""
    import torch

    from piecewise_backend.bench.contenders import all_right, default_contenders
    from piecewise_backend.bench.results import add_ratios, notes, table
    from piecewise_backend.config import parse_options

    for name in ("rounds", "steps", "context", *(["batches"] if arguments.batches else [])):
        values = getattr(arguments, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            raise ValueError(f"--{name} must be at least 1, got {values}")
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options = {"compiler": arguments.compiler, **arguments.options}
    parse_options(options | ({"recorder": arguments.recorder} if arguments.recorder else {}))  # before anything is run
    names = [n for n in _CONTENDERS if n in (arguments.contenders or default_contenders(device))]
    results = _measure(arguments, device, options, names)
    results |= {"device": _device_name(device), "rounds": arguments.rounds, "warmup": arguments.warmup}
    add_ratios(results["cases"], results["base"])
    Console().print(table(results))
    for note in notes(results):
        print(note)
    if arguments.out is not None:
        _write(results, arguments.out)
    return 0 if all(all_right(records) for records in results["cases"].values()) else 1


def _measure(
    arguments: argparse.Namespace, device: Any, options: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """What was measured, in the unit that the model has: a call, or a decode step."""
    from piecewise_backend.bench.calls import CallSettings, bench_calls
    from piecewise_backend.bench.models import both_forms, load_language_model
    from piecewise_backend.dry_run.explain import is_for_runner
    from piecewise_backend.dry_run.inputs import parse_input

    if ":" not in arguments.target:
        model = load_language_model(arguments.target, dtype_named(arguments.dtype), device)
        return _decoding(arguments, device, options, names, *both_forms(model))
    target = load_target(arguments.target)
    inputs = target.inputs or tuple(parse_input(text) for text in arguments.input)
    if not inputs and is_for_runner(target.model):
        return _decoding(arguments, device, options, names, *both_forms(target.model.to(device)))
    if not inputs:
        raise ValueError(
            f"{target.name} gives no example inputs: return (model, inputs), or add --input 8x64:float32 for each"
        )
    model = target.model.to(device) if hasattr(target.model, "to") else target.model
    moved = [v.to(device) if hasattr(v, "to") else v for v in inputs]
    settings = CallSettings(
        device=device,
        recorder=arguments.recorder,
        options=options,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
    )
    cases = {"call": bench_calls(model, moved, names, settings)}
    return {"target": arguments.target, "unit": "call", "base": "eager", "cases": cases}


def _decoding(
    arguments: argparse.Namespace, device: Any, options: dict[str, Any], names: Sequence[str], plain: Any, paged: Any
) -> dict[str, Any]:
    from piecewise_backend.bench.decoding import DecodeSettings, bench_decoding

    settings = DecodeSettings(
        device=device,
        batches=tuple(arguments.batches),
        context=arguments.context,
        steps=arguments.steps,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        recorder=arguments.recorder,
        attention_backend=arguments.attention_backend,
        vocab_size=arguments.vocab_size,
        options=options,
    )
    if plain is None and not hasattr(paged, "config") and arguments.vocab_size is None:
        raise ValueError(f"{type(paged).__name__} has no config.vocab_size; give --vocab-size")
    names = names if plain is not None else ["NONE", *(n for n in names if n not in ("NONE", "eager"))]
    cases = bench_decoding(plain, paged, names, settings)
    base = "eager" if plain is not None else "mrv2 NONE"
    facts = {"context": arguments.context, "steps_per_round": arguments.steps}
    return {"target": arguments.target, "unit": "decode step", "base": base, "cases": cases, **facts}


def _device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def _write(results: dict[str, Any], folder: Path) -> None:
    """JSON with conditions, a Markdown table, and a plot where matplotlib is there."""
    from piecewise_backend.bench import plot
    from piecewise_backend.bench.record import write
    from piecewise_backend.bench.results import markdown

    stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(results["target"]).name)
    path = write(f"bench_{stem}", results, folder)
    path.with_suffix(".md").write_text(markdown(results))
    print(f"wrote {path}")
    if (why := plot.why_no_plot()) is not None:
        print(why)
    elif plot.draw(results, path.with_suffix(".png")):
        print(f"wrote {path.with_suffix('.png')}")
