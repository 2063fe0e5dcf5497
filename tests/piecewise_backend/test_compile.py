import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from piecewise_backend.backend import mrv2
from piecewise_backend.compile import PieceCompiler, forget_compiled_pieces
from piecewise_backend.environment import environment_text, stable_text
from piecewise_backend.reasons import ReasonCode, Reasons
from tests.piecewise_backend import small
from tests.piecewise_backend.operators import same_as_eager, triple

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def start(script, *args, cwd=None, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())} | environment
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    forget_compiled_pieces()
    counters.clear()


def plus(x):
    return x * 2 + 1


def compile_plus(cache_dir, *, size=4, calls=(), **options):
    """Compile `plus` on [size, 8] with a dynamic size; compare with eager at `calls` too. The functions made."""
    functions = []

    def backend(gm, examples):
        functions.append(mrv2(gm, examples, options={"cache_dir": cache_dir, "splitting_ops": (), **options}))
        return functions[-1]

    torch._dynamo.reset()
    compiled = torch.compile(plus, backend=backend)
    x = torch.randn(size, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plus(x))
        for other in calls:
            y = torch.randn(other, 8)
            torch.testing.assert_close(compiled(y), plus(y))
    return functions


def source_of(functions):
    (piece,) = functions[0].program.pieces
    return piece.source


def test_a_llama_of_twelve_layers_is_three_compiles_and_none_in_the_next_process(tmp_path):
    """R05, R09: nothing of a process is in a key; one Dynamo trace for all sizes."""
    pytest.importorskip("transformers")
    from tests.piecewise_backend import llama

    model = llama.build()
    cold = llama.facts_of(llama.compile_and_compare(model, tmp_path / "cache"))
    assert (cold["pieces"], cold["breakpoints"]) == (13, 12)
    assert cold["sources"] == ["inductor"] * 3
    assert cold["misses"] == 3

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    process = start("llama.py", tmp_path / "cache", cwd=elsewhere, PYTHONHASHSEED="7", RANK="3", LOCAL_RANK="3")
    warm = result(process)
    assert warm["keys"] == cold["keys"]
    assert warm["sources"] == ["disk"] * 3
    assert warm["misses"] == 0
    assert warm["reasons"] == cold["reasons"] == []


def test_processes_share_one_folder_and_load_only_what_is_identical(tmp_path):
    """R04, and two processes that compile the same at once."""
    processes = [start("small.py", tmp_path, "probe::triple", PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    one, other = (result(process) for process in processes)
    assert one["sources"].keys() == other["sources"].keys()
    assert one["reasons"] == other["reasons"] == ["no_recorder"]
    assert len(list((tmp_path / "pieces").glob("*.json"))) == 2

    more = small.run(tmp_path, ["probe::triple", "probe::pair"])
    loaded = {piece.key for piece in more.program.pieces if piece.source == "disk"}
    assert loaded == one["sources"].keys() & {piece.key for piece in more.program.pieces}
    assert len(loaded) == 1
    assert len(more.program.pieces) == 3


def test_a_damaged_artifact_is_compiled_again(tmp_path):
    compile_plus(tmp_path)
    for damage in ("truncate", "flip", "garbage", "foreign", "is torch's, cut and signed again"):
        forget_compiled_pieces()
        assert source_of(compile_plus(tmp_path)) == "disk"
        (description,) = (tmp_path / "pieces").glob("*.json")
        entry = json.loads(description.read_text())
        artifact = next((tmp_path / "pieces").glob(f"*.{entry['digest'][:16]}.artifact"))
        content = artifact.read_bytes()
        if damage == "truncate":
            artifact.write_bytes(content[: len(content) // 2])
        elif damage == "flip":
            artifact.write_bytes(content[:99] + bytes([content[99] ^ 8]) + content[100:])
        elif damage == "garbage":
            description.write_text("\x00{")
        elif damage == "foreign":
            description.write_text(json.dumps({"format": "theirs", "key": entry["key"], "digest": "", "guards": ""}))
        else:
            folder = PieceCompiler(compiler="inductor", compiler_options={}, cache_dir=tmp_path, reasons=Reasons())
            folder.artifacts.store(entry["key"], "", lambda path: Path(path).write_bytes(b"not torch's at all"))
        forget_compiled_pieces()
        functions = compile_plus(tmp_path)
        assert source_of(functions) == "inductor", damage
        assert ReasonCode.ARTIFACT_UNREADABLE in functions[0].report.reasons.codes(), damage


def test_code_made_under_a_condition_is_used_only_where_it_holds(tmp_path):
    compile_plus(tmp_path)
    (description,) = (tmp_path / "pieces").glob("*.json")
    entry = json.loads(description.read_text()) | {"guards": "L['t0'] <= 100"}
    description.write_text(json.dumps(entry))
    forget_compiled_pieces()
    functions = compile_plus(tmp_path, size=50, calls=(60, 200))
    assert [f.program.pieces[0].source for f in functions] == ["disk", "inductor"]
    assert functions[0].program.pieces[0].guards == "L['t0'] <= 100"
    assert source_of(compile_plus(tmp_path, size=50)) == "inductor", "the latest, which needs no condition"


def test_a_condition_is_checked_for_code_of_this_process_too(tmp_path, monkeypatch):
    from piecewise_backend import compile as module

    monkeypatch.setattr(module, "_new_guards", lambda known, sizes: "L['t0'] <= 100")
    first = compile_plus(tmp_path, size=50, cache=False)
    monkeypatch.setattr(module, "_new_guards", lambda known, sizes: "")
    again, above = (compile_plus(tmp_path, size=size, cache=False) for size in (60, 200))
    assert again[0].program.pieces[0] is first[0].program.pieces[0]
    assert above[0].program.pieces[0] is not first[0].program.pieces[0]


def test_a_folder_that_cannot_be_written_costs_the_saving_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    functions = compile_plus(tmp_path / "file" / "cache", calls=(5, 6))
    assert source_of(functions) == "inductor"
    reasons = {reason.code: reason for reason, _ in functions[0].report.reasons}
    assert "writable" in reasons[ReasonCode.ARTIFACT_NOT_SAVED].hint
    assert ReasonCode.ARTIFACT_UNREADABLE in reasons


def test_without_a_cpp_compiler_pieces_run_as_traced_and_the_report_says_so(tmp_path):
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        for _ in range(2):  # compiled, then known in this process
            functions = compile_plus(tmp_path, calls=(5,))
            assert source_of(functions) == "eager"
            reasons = {reason.code: reason for reason, _ in functions[0].report.reasons}
            assert "CXX" in reasons[ReasonCode.COMPILER_UNAVAILABLE].hint
    assert source_of(compile_plus(tmp_path)) == "inductor"


def test_one_piece_for_three_sizes_leaves_its_graph_as_it_was(tmp_path):
    """R10."""
    seen = []

    def model(x):
        a, b = x.chunk(2)
        return {"a": a + 1, "b": [b * 2, (a - b,)]}

    def backend(gm, examples):
        before = (gm.code, [n.name for n in gm.graph.nodes], [n.meta.get("example_value") for n in gm.graph.nodes])
        function = mrv2(gm, examples, options={"cache_dir": tmp_path})
        after = (gm.code, [n.name for n in gm.graph.nodes], [n.meta.get("example_value") for n in gm.graph.nodes])
        seen.append(before[:2] == after[:2] and all(b is a for b, a in zip(before[2], after[2], strict=True)))
        return function

    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad():
        for size in (2, 4, 6):
            x = torch.randn(size, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert seen == [True] * 3


@pytest.mark.parametrize(
    ("options", "near"),
    [({"max_autotun": True}, "max_autotune"), ({"triton.cudagraphs": True}, "FULL_AND_PIECEWISE")],
)
def test_an_inductor_option_that_does_not_exist_or_would_conflict_is_an_error(options, near):
    with torch.no_grad(), pytest.raises(Exception, match=near):
        torch.compile(plus, backend=mrv2, options={"compiler_options": options})(torch.randn(3))


def test_keys_change_with_what_matters_and_with_nothing_else(tmp_path, monkeypatch):
    """R05."""

    def key(**options):
        given = {"compiler": "inductor", "compiler_options": {}, "cache_dir": tmp_path, "reasons": Reasons()} | options
        return PieceCompiler(**given).key("structure")

    first = key()
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.chdir(tmp_path)
    assert key(cache_dir=tmp_path / "other") == first
    with torch._inductor.config.patch({"aot_inductor.output_path": "/elsewhere"}):
        assert key() == first
    assert key(compiler_options={"max_autotune": True}) != first
    assert key(compiler="eager") != first
    with torch._inductor.config.patch({"epilogue_fusion": not torch._inductor.config.epilogue_fusion}):
        assert key() != first
    torch.set_float32_matmul_precision("high")
    try:
        assert key() != first
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_environment_is_described_without_addresses_or_order():
    text = environment_text("inductor", {"a": lambda: None})
    assert " at 0x" not in text
    assert stable_text({"b": {2, 1}, "a": [None]}) == stable_text({"a": [None], "b": {1, 2}})


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_one_trace_serves_every_size_when_guards_are_skipped(compiler):
    """R06, R09: the first call is large, then 1, 4, 4096 and more; a piece of parameters alone has no size at all."""
    traces = []
    weight = torch.nn.Parameter(torch.randn(8, 8))

    def model(x):
        w = triple(weight * 2)
        return triple(x @ w) + x.shape[0]

    def backend(gm, examples):
        traces.append(mrv2(gm, examples, options={"compiler": compiler, "splitting_ops": ("probe::triple",)}))
        return traces[-1]

    compiled = torch.compile(
        model, backend=backend, options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}, fullgraph=True
    )
    with torch.no_grad():
        for size in (64, 1, 4, 4096, *range(2, 22)):
            x = torch.randn(size, 8)
            if not traces:
                torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(traces) == 1


def test_twenty_sizes_of_a_marked_dimension_are_one_trace(tmp_path):
    """R09."""
    started = time.perf_counter()
    functions = compile_plus(tmp_path, size=30, calls=range(2, 22))
    assert len(functions) == 1
    assert functions[0].report.compile_seconds <= time.perf_counter() - started


@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_compiled_pieces_write_share_and_return_what_eager_does(dynamic):
    def model(x, y):
        a = x * 2
        flat = a.view(-1)
        b = triple(a)
        flat.add_(1)
        x.mul_(2)
        return a, flat, b + a, x.view(-1), y

    same_as_eager(model, torch.randn(4, 8), torch.randn(3), dynamic=dynamic, compiler="inductor")
