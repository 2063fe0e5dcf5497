"""The command's parser, and how its errors become an exit status."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from piecewise_backend.cli import bench, doctor, explain, generate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 where `explain` or `bench` found something wrong, or 2 for input
    it cannot use."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return arguments.run(arguments)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"mrv2: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrv2", description="CUDA graphs for any PyTorch model.")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is compiled and captured as it happens")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (generate, explain, bench, doctor):
        command.add_to(commands)
    return parser
