"""`dump`: the files exist, import, and show the pieces; and nothing of torch or the model is changed by it."""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

import piecewise_backend
from piecewise_backend.dumping.bytecode import MISSING
from piecewise_backend.observe import observers
from piecewise_backend.runner import LLM
from tests.hybrid import make_hybrid_runner
from tests.piecewise_backend.operators import triple
from tests.tiny import VOCAB, TinyDecoder

ROOT = Path(__file__).resolve().parents[2]


def model(x: torch.Tensor) -> torch.Tensor:
    return triple(gelu(x)).softmax(-1)


def call(function: Callable[..., Any] = model, rows: int = 4, **options: Any) -> None:
    given = {"recorder": "emulated", "compiler": "eager", "capture_after": 1, "cache": False} | options
    piecewise_backend.reset()
    with torch.no_grad():
        torch.compile(function, backend="mrv2", options={**given, "splitting_ops": ["probe::triple"]})(
            torch.randn(rows, 8)
        )


def load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"dumped_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_links(folder: Path) -> list[str]:
    """Every link of the index leads to a file, every file is linked, every Python file can be imported."""
    links = re.findall(r"\]\((.+?)\)", (folder / "index.md").read_text())
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    assert set(links) == files - {"index.md", "mrv2_dump.json"}
    for name in links:
        if name.endswith(".py"):
            load(folder / name)
    return links


def test_a_dump_of_a_compiled_function_shows_every_stage(tmp_path: Path) -> None:
    with piecewise_backend.dump(tmp_path / "out"):
        call(compiler="inductor")
    links = check_links(tmp_path / "out")
    graph = tmp_path / "out" / "graph_0"
    assert {"captures.json", "resolution.json", "report.txt"} <= {f.name for f in graph.iterdir()}
    pieces = [load(tmp_path / "out" / name) for name in links if re.search(r"piece_\w{12}\.py$", name)]
    assert sum("_nn.gelu(" in Path(p.__file__).read_text() for p in pieces) == 1
    assert len(pieces) == 2
    inductor = [(tmp_path / "out" / name).read_text() for name in links if name.endswith("_inductor.py")]
    assert len(inductor) == 2
    assert all("cpp_fused" in text for text in inductor)
    x = torch.randn(4, 8)
    torch.testing.assert_close(load(graph / "after_split.py").forward(x)[0], model(x))
    torch.testing.assert_close(load(graph / "before_split.py").GraphModule()(x)[0], model(x))
    decompiled = [(tmp_path / "out" / name).read_text() for name in links if re.match(r"dynamo_\d+_model\.py", name)]
    assert len(decompiled) == 1
    assert "__compiled_fn" in decompiled[0]
    assert any(name.endswith("_guards.txt") for name in links)


def test_a_function_that_reads_variables_around_it_is_decompiled_to_valid_python(tmp_path: Path) -> None:
    scale = torch.full((8,), 3.0)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * scale

    with piecewise_backend.dump(tmp_path / "out"):
        torch.compile(scaled, backend="mrv2", options={"recorder": "none", "compiler": "eager"})(torch.randn(4, 8))
    assert "dynamo_0_scaled.py" in check_links(tmp_path / "out")


def test_captures_are_described_with_shapes_dtypes_and_addresses(tmp_path: Path) -> None:
    with piecewise_backend.dump(tmp_path):
        call()
    (capture,) = json.loads((tmp_path / "graph_0" / "captures.json").read_text())
    assert capture["variant"].startswith("PIECEWISE")
    assert capture["eager_steps"] == ["probe::triple 1"]
    (given,) = capture["inputs"]
    assert (given["dtype"], given["shape"]) == ("float32", [4, 8])
    assert int(given["address"], 16) > 0
    assert len(capture["fingerprint"]) == 16
    resolved = json.loads((tmp_path / "graph_0" / "resolution.json").read_text())
    assert resolved["mode"]["requested"] == "FULL_AND_PIECEWISE"
    assert "reasons" in resolved


@pytest.mark.parametrize("kind", ["runner", "LLM"])
def test_a_dump_of_a_runner_holds_its_metadata_descriptor_by_descriptor(kind: str, tmp_path: Path) -> None:
    with piecewise_backend.dump(tmp_path):
        if kind == "runner":
            runner = make_hybrid_runner("FULL_AND_PIECEWISE")
        else:
            options = {"recorder": "emulated", "compiler": "eager", "capture_sizes": [2, 4], "cache": False}
            limits = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 32}
            runner = LLM(TinyDecoder(1), vocab_size=VOCAB, device="cpu", options=options, **limits).runner
    check_links(tmp_path)
    captures = json.loads((tmp_path / "graph_0" / "captures.json").read_text())
    assert [c["variant"] for c in captures] == [size.descriptor for size in runner.report.sizes]
    for capture in captures:
        layers = {layer for group in capture["metadata"] for layer in group["layers"]}
        assert layers == set(runner.layers)
        assert all(any("address" in v for v in group["fields"].values()) for group in capture["metadata"])
    resolved = json.loads((tmp_path / "graph_0" / "resolution.json").read_text())
    assert len(resolved["groups"]) == len(runner.groups)


def test_a_program_that_is_on_disk_is_traced_anew_to_be_dumped(tmp_path: Path, artifact_dir: Path) -> None:
    options = {"recorder": "emulated", "capture_sizes": [2]}
    limits = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 32}
    for name in ("cold", "warm"):
        piecewise_backend.reset()
        with piecewise_backend.dump(tmp_path / name):
            LLM(TinyDecoder(1), vocab_size=VOCAB, device="cpu", options=options, **limits)
        check_links(tmp_path / name)
    files = [{path.name for path in (tmp_path / name / "graph_0").iterdir()} for name in ("cold", "warm")]
    assert files[0] == files[1]
    assert any(name.endswith("_inductor.py") for name in files[1])


def state_of_torch() -> tuple[Any, ...]:
    codecache = torch._inductor.codecache.PyCodeCache
    return (
        dict(torch._dynamo.convert_frame._bytecode_hooks),
        codecache.load_by_key_path,
        torch.fx.graph_module._exec_with_source,
        torch._dynamo.utils.lazy_format_graph_code.__code__,
        list(observers),
    )


def test_a_model_that_fails_is_dumped_as_far_as_it_came_and_torch_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the compiler gave up")

    monkeypatch.setattr("piecewise_backend.compile.PieceCompiler._compile", fail)
    before = state_of_torch()
    with pytest.raises(Exception, match="the compiler gave up"), piecewise_backend.dump(tmp_path):
        call()
    assert state_of_torch() == before
    assert "the model failed" in (tmp_path / "index.md").read_text()
    assert "gelu" in (tmp_path / "graph_0" / "after_split.py").read_text()
    check_links(tmp_path)


def test_a_second_dump_into_a_folder_replaces_the_first_and_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    with piecewise_backend.dump(tmp_path):
        call()
        call(lambda x: triple(x) + 1)
    assert (tmp_path / "graph_1").is_dir()
    (tmp_path / "notes.txt").write_text("mine")
    with piecewise_backend.dump(tmp_path):
        call()
    assert not (tmp_path / "graph_1").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_nested_dumps_need_folders_of_their_own(tmp_path: Path) -> None:
    with piecewise_backend.dump(tmp_path / "outer"):
        with pytest.raises(ValueError, match="open already"), piecewise_backend.dump(tmp_path / "outer"):
            pass
        with piecewise_backend.dump(tmp_path / "inner"):
            call()
    for name in ("outer", "inner"):
        assert "graph_0/before_split.py" in check_links(tmp_path / name)


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="give a folder that is writable"), piecewise_backend.dump(tmp_path / "file"):
        pytest.fail("the model ran")


def test_a_disk_that_fills_up_does_not_stop_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    with piecewise_backend.dump(tmp_path) as dumped:
        monkeypatch.setattr(Path, "write_text", full)
        call()
    monkeypatch.undo()
    assert any("no space left" in problem for problem in dumped.folder.problems)


def test_without_depyf_everything_else_is_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "depyf" else found(name, *a))
    monkeypatch.setitem(sys.modules, "depyf", None)
    with caplog.at_level(logging.WARNING), piecewise_backend.dump(tmp_path):
        call()
    assert MISSING in (tmp_path / "index.md").read_text()
    assert MISSING in caplog.text
    links = check_links(tmp_path)
    assert any(name.startswith("dynamo_0") and name.endswith(".txt") for name in links)
    assert "graph_0/after_split.py" in links


SCRIPT = """
import torch
with torch.no_grad():
    options = {"recorder": "emulated", "compiler": "eager", "capture_after": 1, "cache": False}
    torch.compile(lambda x: x.sin() + 1, backend="mrv2", options=options)(torch.randn(4, 8))
"""


def test_mrv2_dump_dumps_a_process_without_a_change_to_its_code(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MRV2_DUMP": str(tmp_path / "out")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "out").iterdir()
    links = check_links(folder)
    assert "graph_0/captures.json" in links
    assert any(name.startswith("dynamo_0") for name in links)


def test_an_mrv2_dump_that_cannot_be_written_is_said_and_the_model_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MRV2_DUMP": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MRV2_DUMP is ignored" in done.stderr
