"""The command `mrv2`: one file per subcommand."""

from piecewise_backend.cli.command import main

__all__ = ["main"]
