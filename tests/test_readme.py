"""The README's code runs, and its shell commands are ones that CI runs."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w+)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 900

# Shell commands that the README may show (whole-line patterns), and how CI runs each.
RUN_BY_CI = {
    r"git clone \S+( \S+)?": "CI starts from a clone",
    r"cd \S+": "CI starts in the clone",
    r"make test": ".ci/run calls it",
    r"make lint": "`make test` starts with it",
    r"make demo": "test_the_demo_says_that_the_capital_of_france_is_paris runs its command",
    r"bash \.ci/run": "it is CI",
}


def blocks(*languages: str) -> list[str]:
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    return [textwrap.dedent(body) for language, body in FENCE.findall(text) if language.lower() in languages]


def shell_commands() -> list[str]:
    """Commands of the shell blocks: continuations joined, `&&` split, prompts and comments dropped."""
    text = "\n".join(blocks("bash", "sh", "shell", "console")).replace("\\\n", " ").replace("&&", "\n")
    commands = (shlex.split(line.removeprefix("$ "), comments=True) for line in text.splitlines())
    return [shlex.join(command) for command in commands if command]


def demo_command() -> list[str]:
    """What `make demo` runs, as the Makefile has it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = re.search(r"^DEMO = (.+)$", makefile, re.MULTILINE)
    assert command, "the Makefile defines no DEMO"
    assert "\ndemo: $(INSTALLED)\n\t$(BIN)/$(DEMO)\n" in makefile, "`make demo` does not run DEMO"
    return shlex.split(command[1])


def run(command: list[str], cache_dir: Path) -> str:
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"MRV2_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    output = f"{shlex.join(command)} exited with {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert result.returncode == 0, output
    return result.stdout


def test_the_readme_shows_python_code() -> None:
    assert README.exists(), "README.md is missing"
    assert blocks("python", "py", "python3"), "README.md has no ```python block"


@pytest.mark.parametrize("number", range(1, len(blocks("python", "py", "python3")) + 1))
def test_a_python_block_of_the_readme_runs_by_itself(number: int, tmp_path: Path) -> None:
    script = tmp_path / f"readme_block_{number}.py"
    script.write_text(blocks("python", "py", "python3")[number - 1], encoding="utf-8")
    run([sys.executable, str(script)], cache_dir=tmp_path / "cache")


def test_every_shell_command_of_the_readme_is_one_that_ci_runs() -> None:
    demo = shlex.join(demo_command())
    strangers = [
        command
        for command in shell_commands()
        if command != demo and not any(re.fullmatch(pattern, command) for pattern in RUN_BY_CI)
    ]
    assert not strangers, f"CI does not run {strangers}; make it, then say how in RUN_BY_CI"


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "make test"


def test_the_demo_says_that_the_capital_of_france_is_paris(tmp_path: Path) -> None:
    program, *arguments = demo_command()
    output = run([str(Path(sys.executable).with_name(program)), *arguments], cache_dir=tmp_path)
    assert " Paris" in output, output
