"""`mrv2 explain` and `mrv2 bench`: exit statuses, and what they say to a person."""

import json
import sys
from pathlib import Path

import pytest

from piecewise_backend.bench.calls import Call
from piecewise_backend.cli import main

FACTORIES = """
import torch
from torch import nn


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.randn(8, 16))

    def forward(self, x):
        return x + self.positions


class Reads(nn.Module):
    def forward(self, x):
        return x / x.abs().amax().item()


class Masks(nn.Module):
    def forward(self, x):
        return x + x[x > 0].sum()


def fine():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU())


def fine_with_inputs():
    return fine(), torch.randn(8, 16)


def fixed():
    return Fixed(), torch.randn(8, 16)


def reads():
    return Reads(), (torch.randn(8, 16),)


def masks():
    return Masks(), (torch.randn(8, 16),)


def fails():
    return {}["weights"]


def returns_a_number():
    return 3


loaded = nn.Linear(16, 16)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    yield path
    sys.modules.pop("factories", None)


def line_with(path: Path, code: str) -> str:
    (number,) = (n for n, line in enumerate(path.read_text().splitlines(), start=1) if code in line)
    return f"{path}:{number}"


@pytest.mark.parametrize(
    ("factory", "op", "code"),
    [
        ("reads", "Tensor.item", "amax().item()"),
        ("masks", "aten.nonzero.default", "x[x > 0]"),
        ("fixed", "add", "x + self.positions"),
    ],
)
def test_what_breaks_is_in_the_first_line_and_the_status_is_one(
    factory: str, op: str, code: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"factories.py:{factory}"]) == 1
    shown = capsys.readouterr().out
    assert f"{op} at {Path('factories.py')}:" in shown.splitlines()[0].replace(str(factories.parent) + "/", "")
    assert f":{line_with(factories, code).rpartition(':')[2]}" in shown.splitlines()[0]


def test_a_model_that_captures_has_status_zero(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "factories:fine_with_inputs"]) == 0
    assert "captures fully" in capsys.readouterr().out.splitlines()[0]


def test_inputs_sizes_and_mode_are_taken_and_facts_come_as_json(
    factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--input", "6x16:float32", "--sizes", "4,16", "--mode", "PIECEWISE", "--json"]
    assert main(["explain", "factories:fine", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mode_requested"] == "PIECEWISE"
    assert [size["num_rows"] for size in facts["graphs"][0]["sizes"]] == [4, 16]


def test_a_module_object_is_a_model_too(factories: Path) -> None:
    assert main(["explain", "factories:loaded", "--input", "8x16"]) == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factories.py:fin", "unknown factory in factories.py: 'fin'; did you mean 'fine'"),
        ("factorys.py:fine", "no file 'factorys.py'; did you mean 'factories.py'?"),
        ("factoriez:fine", "unknown module 'factoriez'; did you mean 'factories'"),
        ("factories:fails", "factories:fails raised KeyError: 'weights' ("),
        ("factories:returns_a_number", "returned an object of type int; expected a model, or (model, inputs)"),
        ("factories", "expected module:factory or path/to/file.py:factory, got 'factories'"),
        ("factories:fine", "gives no example inputs: return (model, inputs), or add --input 8x64:float32"),
    ],
)
def test_what_cannot_be_used_ends_with_status_two_and_one_clear_line(
    target: str, message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", target]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mrv2: ")
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8by16", "expected an input such as 8x64:float32, got '8by16'"),
        ("8x16:float3", "unknown input dtype 'float3'; did you mean 'float32'"),
        ("8x7", "the model fails on these inputs before anything is compiled"),
    ],
)
def test_a_wrong_input_is_named(text: str, message: str, factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "factories:fine", "--input", text]) == 2
    assert message in capsys.readouterr().err


BENCH = ["--rounds", "2", "--warmup", "1", "--compiler", "eager", "--contenders", "eager", "NONE", "FULL"]


def test_bench_writes_table_record_and_picture(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "factories:fine", "--input", "8x16", *BENCH, "--device", "cpu", "--out", "out"]) == 0
    shown = capsys.readouterr().out
    assert "mrv2 FULL: no CUDA graphs on cpu, so this would be NONE" in shown
    names = {path.suffix for path in Path("out").iterdir()}
    assert names == {".json", ".md", ".png"}
    record = json.loads(next(Path("out").glob("*.json")).read_text())
    assert record["cases"]["call"]["mrv2 NONE"]["speed_up_over_eager"] > 0
    assert record["conditions"]["date"]


def test_bench_gives_emulated_graphs_no_time(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*BENCH, "--device", "cpu", "--recorder", "emulated"]
    assert main(["bench", "factories:fine_with_inputs", *options]) == 0
    shown = capsys.readouterr().out
    assert "right, not timed" in shown
    assert "mrv2 FULL: output checked; no time" in shown


def test_bench_ends_with_status_one_where_an_output_is_wrong(
    factories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Call.run
    monkeypatch.setattr(Call, "run", lambda self: run(self) + (self.name == "mrv2 NONE"))
    assert main(["bench", "factories:fine_with_inputs", *BENCH, "--device", "cpu"]) == 1
    assert "mrv2 NONE: WRONG output, so it is not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factories:fine"], "gives no example inputs"),
        (["nowhere"], "no model at 'nowhere'"),
        (["factories:fine", "--rounds", "0"], "--rounds must be at least 1"),
        (["factories:fine", "--options", '{"compilr": "eager"}'], "did you mean 'compiler'"),
    ],
)
def test_bench_names_what_it_cannot_use(
    arguments: list[str], message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
