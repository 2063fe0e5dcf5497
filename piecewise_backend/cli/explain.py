"""`mrv2 explain`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from piecewise_backend.cli.target import load_target
from piecewise_backend.cli.values import sizes
from piecewise_backend.config import MODES

_WHAT = """Captures a model on the emulated recorder, without a GPU, and says what would break. Exit status 0: the model
captures fully. 1: something would break or go another way. 2: input it cannot use."""


def add_to(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    explain = commands.add_parser(
        "explain", help="say whether a model captures, and which line breaks it", description=_WHAT
    )
    explain.add_argument(
        "target", help="module:factory or path/to/file.py:factory, returning a model or (model, inputs)"
    )
    explain.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE:DTYPE",
        help="an input where the factory gives none, such as 8x64:float32; once for each",
    )
    explain.add_argument("--device", default="cpu", help="where to run it (default %(default)s)")
    explain.add_argument("--mode", default="FULL_AND_PIECEWISE", help=f"{', '.join(MODES)} (default %(default)s)")
    explain.add_argument("--sizes", type=sizes, default=None, help="capture sizes to try, such as 4,8 (default: two)")
    explain.add_argument("--dim", type=int, default=0, help="the dimension of the inputs that varies (default 0)")
    explain.add_argument(
        "--compiler",
        default="eager",
        help="eager, aot_eager or inductor (default eager, for speed; operators show singly)",
    )
    explain.add_argument("--json", action="store_true", help="print the facts as JSON instead")
    explain.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found: 0 or 1. ValueError for what cannot be used."""
    from piecewise_backend.dry_run import explain
    from piecewise_backend.dry_run.explain import is_for_runner
    from piecewise_backend.dry_run.inputs import parse_input

    target = load_target(arguments.target)
    inputs = target.inputs or tuple(parse_input(text) for text in arguments.input)
    if target.inputs and arguments.input:
        raise ValueError(f"{target.name} gives inputs itself: leave --input out")
    if not inputs and not is_for_runner(target.model):
        raise ValueError(
            f"{target.name} gives no example inputs: return (model, inputs), or add --input 8x64:float32 for each"
        )
    found = explain(
        target.model,
        *inputs,
        device=arguments.device,
        mode=arguments.mode,
        sizes=arguments.sizes,
        compiler=arguments.compiler,
        dim=arguments.dim,
    )
    console = Console()
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    elif console.is_terminal:
        console.print(found)
    else:
        print(found)
    return 0 if found.captures_fully else 1
