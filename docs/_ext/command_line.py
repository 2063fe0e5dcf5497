"""The directive `command-line`: every subcommand and option of `mrv2`, from its own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sphinx.util.docutils import SphinxDirective

from piecewise_backend.cli.command import _parser


def pages(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Markdown lines: the options of all commands, then each subcommand under a heading."""
    yield from _options(parser)
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            yield from ("", f"## `mrv2 {name}`", "", _sentence(helps.get(name, "")), "")
            if command.description:
                yield from (" ".join(command.description.split()), "")
            yield from ("```text", command.format_usage().strip(), "```", "")
            yield from _options(command)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)]
    if not shown:
        return
    yield from ("| argument | what |", "|---|---|")
    formatter = parser._get_formatter()
    for action in shown:
        text = formatter._expand_help(action) if action.help else ""
        if action.choices is not None:
            text = f"{text} (one of {', '.join(map(str, action.choices))})".strip()
        required = " **Required.**" if action.required and action.option_strings else ""
        yield f"| {_name(action)} | {_cell(text)}{required} |"


def _name(action: argparse.Action) -> str:
    names = action.option_strings or [action.metavar or action.dest]
    takes_value = bool(action.option_strings) and action.nargs != 0
    value = f" {action.metavar or action.dest.upper()}" if takes_value else ""
    return ", ".join(f"`{name}{value}`" for name in names)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


class CommandLine(SphinxDirective):
    """`{command-line}`: no argument and no content."""

    def run(self) -> list[Any]:
        """The parsed pages."""
        return self.parse_text_to_nodes("\n".join(pages(_parser())), allow_section_headings=True)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
