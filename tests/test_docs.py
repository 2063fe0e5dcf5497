"""The documentation runs: its code, its shell commands; and it says what exists, no more and no less."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import piecewise_backend
from docs import collect_plots
from piecewise_backend import ReasonCode
from piecewise_backend.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(
    r"^(?:[ \t]*<!-- not run: (?P<why>[^\n]+?) -->\n)?"
    r"(?P<indent>[ \t]*)```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^[ \t]*```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
MOST_SECONDS = 20
"""Of processor time, for the code of one page and the processes that it waits for."""
TIMEOUT_S = 300
"""On a machine that does other things too."""
WHY_NOT_RUN = ("needs a GPU", "needs a model on disk")

# Commands other than mrv2 and make, by their first word: why they are right.
KNOWN_COMMANDS = {
    "git": "any clone will do",
    "cd": "into the clone",
    "python": "runs a script of the reader's",
    "torchrun": "runs a script of the reader's",
}


class Block(NamedTuple):
    language: str
    line: int  # of its first line in the page, from 1
    code: str
    why_not_run: str | None


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("body")) + 1
            body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
            found.append(Block(match["language"], line, body, match["why"]))
    return found


def script(page: Path) -> str:
    """The code of a page in one script, each line where the page has it: a traceback's numbers are the page's."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if block.why_not_run is None:
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join([*lines, "import os", "print('seconds', sum(os.times()[:4]))", ""])


def pages_with_code() -> list[Path]:
    return [page for page in PAGES if any(b.why_not_run is None for b in blocks(page, "python"))]


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", pages_with_code(), ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{page.stem.replace('-', '_')}.py"
    path.write_text(script(page), encoding="utf-8")
    here = {"MRV2_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=os.environ | here,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, f"{name(page)}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    seconds = float(result.stdout.split()[-1])
    assert seconds < MOST_SECONDS, f"{name(page)} took {seconds:.0f} s of processor time; allowed are {MOST_SECONDS}"


def test_a_python_block_that_is_not_run_says_why() -> None:
    reasons = {(name(p), b.line): b.why_not_run for p in PAGES for b in blocks(p, "python") if b.why_not_run}
    strangers = {place: why for place, why in reasons.items() if not why.startswith(WHY_NOT_RUN)}
    assert not strangers, f"allowed reasons begin with {WHY_NOT_RUN}"


def shell_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command: continuations joined, comments and settings of variables dropped."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash", "sh", "console"):
            for line in block.code.replace("\\\n", " ").replace("&&", "\n").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and (words[0] == "export" or re.match(r"[A-Z][A-Z0-9_]*=", words[0])):
                    words.pop(0)
                if words:
                    found.append((name(page), words))
    return found


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    return capsys.readouterr().out


def test_every_mrv2_command_that_is_shown_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    subcommands = re.findall(r"^    (\w+) ", help_of(capsys), re.MULTILINE)
    shown = [(page, words[1:]) for page, words in shell_commands() if words[0] == "mrv2"]
    assert shown
    for page, (subcommand, *arguments) in shown:
        assert subcommand in subcommands, f"{page}: mrv2 {subcommand}; there are {subcommands}"
        options = set(re.findall(r"--[\w-]+", help_of(capsys, subcommand)))
        unknown = {a.partition("=")[0] for a in arguments if a.startswith("--")} - options
        assert not unknown, f"{page}: mrv2 {subcommand} has no {unknown}; it has {sorted(options)}"


def test_every_subcommand_is_shown_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    subcommands = set(re.findall(r"^    (\w+) ", help_of(capsys), re.MULTILINE))
    assert subcommands <= {words[1] for _, words in shell_commands() if words[0] == "mrv2"}


def test_every_other_command_that_is_shown_is_a_target_of_make_or_known() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    for page, words in shell_commands():
        if words[0] == "make":
            assert set(words[1:]) <= targets, f"{page}: {shlex.join(words)}; targets are {sorted(targets)}"
        elif words[:2] == ["pip", "install"]:
            asked = {e for extra in re.findall(r"\[(.*?)\]", words[-1]) for e in extra.split(",")}
            assert asked <= extras, f"{page}: {shlex.join(words)}; extras are {sorted(extras)}"
        else:
            assert words[0] == "mrv2" or words[0] in KNOWN_COMMANDS, f"{page}: nobody knows {shlex.join(words)}"


def test_every_variable_of_the_environment_that_is_named_is_read_by_the_configuration() -> None:
    read = set(re.findall(r"MRV2_\w+", (ROOT / "piecewise_backend" / "config.py").read_text(encoding="utf-8")))
    named = {variable for page in PAGES for variable in re.findall(r"MRV2_\w+", page.read_text(encoding="utf-8"))}
    assert named == read


def test_each_reason_code_has_exactly_one_entry_and_no_entry_is_for_a_code_that_does_not_exist() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert sorted(entries) == sorted(code.value for code in ReasonCode)


def test_each_entry_of_a_reason_code_says_what_it_means_when_it_comes_and_what_to_do() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        code, _, body = entry.partition("\n")
        found = [
            label for label in ("Means", "Comes", "Do") if re.search(rf"^\*\*{label}\.\*\* \S", body, re.MULTILINE)
        ]
        assert found == ["Means", "Comes", "Do"], f"{code} has {found} only"


@pytest.mark.parametrize("module", ["piecewise_backend", "piecewise_backend.runner"])
def test_every_name_that_a_package_offers_is_in_the_reference(module: str) -> None:
    page = DOCS / "reference" / f"{module.rpartition('.')[2]}.md"
    shown = re.findall(r"^\.\. auto(?:class|function|exception):: (?:[\w.]+\.)?(\w+)$", page.read_text(), re.MULTILINE)
    missing = set(importlib.import_module(module).__all__) - set(shown)
    assert not missing, f"add {sorted(missing)} to {name(page)}"


def test_the_table_of_report_keys_has_the_keys_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from report_keys import as_dict, rows

    options = {"recorder": "emulated", "compiler": "eager"}
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="mrv2", options=options)
    with torch.inference_mode():
        compiled(torch.randn(2, 4))
    report = piecewise_backend.report(compiled).to_dict()
    documented = [key for key, _ in rows(as_dict.__doc__ or "")]
    assert {key for key in documented if "." not in key} == set(report)
    assert {key.partition(".")[2] for key in documented if key.startswith("program.")} <= set(report["program"])


def test_the_page_that_compares_has_the_figures_of_the_readme() -> None:
    rows = re.findall(
        r"^\| .*\d \|$", (DOCS / "explanation" / "comparison.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert rows
    assert not [row for row in rows if row not in readme]


def test_a_docstring_becomes_text_that_restructuredtext_does_not_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from plain_docstrings import as_rst

    assert as_rst(["Sums a*b, x_ and `c*d`.", "", "    sum(x)", "Then more."]) == [
        r"Sums a\*b, x\_ and `c*d`.", "",
        "", "::", "", "    sum(x)", "",
        "Then more.",
    ]  # fmt: skip


def test_plots_on_the_pages_are_those_of_the_notebooks_and_records(tmp_path: Path) -> None:
    """`python -m docs.collect_plots` makes them anew."""
    collect_plots.main(tmp_path)
    for picture in tmp_path.iterdir():
        assert (DOCS / "images" / "plots" / picture.name).read_bytes() == picture.read_bytes(), picture.name
    shown = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert not [p.name for p in (DOCS / "images" / "plots").iterdir() if f"plots/{p.name}" not in shown]
