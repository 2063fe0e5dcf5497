"""`mrv2 doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console


def add_to(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    doctor = commands.add_parser("doctor", help="say what this machine can do, and why not more")
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; always 0."""
    from piecewise_backend.doctor import table

    Console().print(table())
    return 0
