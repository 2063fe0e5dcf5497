"""What a step costs the host: replayed, through the split graph, and through plain `torch.compile`; and a start,
cold and warm.

    pytest benchmarks/host_overhead.py

All contenders run the same operators on the same sizes in one process; results are ratios and differences, written to
`benchmarks/results/host_overhead.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import write
from piecewise_backend.backend import compile_graph
from piecewise_backend.config import parse_options
from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.cudagraph.fingerprint import Fingerprint
from piecewise_backend.program import Program

NUM_LAYERS = 30
STEPS = ("calls themselves", "replayed", "split graph", "torch.compile")
VIEWS = ("same views", "new views")
RESULTS: dict[str, float] = {}

_library = torch.library.Library("mrv2_bench", "DEF")
_library.define("mix(Tensor x, Tensor(a!) out) -> ()")


def _mix(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


_library.impl("mix", _mix, "CPU")
_library.impl("mix", lambda x, out: None, "Meta")


class Layers(nn.Module):
    """Many small pieces with a cheap breakpoint between them: almost nothing but host time."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            y = x * weight
            out = torch.empty_like(y)
            torch.ops.mrv2_bench.mix(y, out)
            x = out + 1
        return x


class DirectRecorder:
    """Repeats calls as they were made: what a recording costs beyond the calls themselves is then bookkeeping."""

    name, executes = "direct", True

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], list[Any]]] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._calls = []

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        self._calls.append((run, list(args)))
        return run(*args)

    def end(self) -> Any:
        return DirectGraph(self._calls)

    def abort(self) -> None:
        self._calls = []

    def weaken(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def memory_bytes(self) -> int:
        return 0


class DirectGraph:
    def __init__(self, calls: list[tuple[Callable[..., Any], list[Any]]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for run, args in self.calls:
            run(*args)


class Step:
    """One step of `Layers`, ready to be run in each way."""

    def __init__(self) -> None:
        self.model, self.x = Layers(), torch.randn(4, 16)
        programs: list[tuple[Program, tuple[Any, ...]]] = []

        def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            options = parse_options({"splitting_ops": ["mrv2_bench::mix"], "cache": False})
            program, _ = compile_graph(gm, options)

            def call(*args: Any) -> Any:
                programs.append((program, args))
                return program.run(args)

            return call

        with torch.no_grad():
            torch.compile(self.model, backend=backend)(self.x)
            self.program, self.args = programs[0]
            self.captured: CapturedProgram = self.program.capture(
                self.args, recorder=DirectRecorder(), records=lambda step: False, execute=True
            )
            self.calls = self._collect_calls()
            self.plain = torch.compile(self.model)
            expected = self.model(self.x)
            for result in (self.program.run(self.args)[0], self.captured.replay()[0], self.plain(self.x)):
                torch.testing.assert_close(result, expected)

    def _collect_calls(self) -> list[tuple[Callable[..., Any], list[Any]]]:
        """Every call that a step makes, with its arguments: the operators themselves."""
        slots, calls = self.program.fill(self.args), []
        for step in self.program.steps:
            args = [slots[i] for i in step.inputs]
            results = step.run(*args)
            calls.append((step.run, args))
            for slot, value in zip(step.outputs, results, strict=True):
                slots[slot] = value
        return calls

    def run_calls(self) -> None:
        for run, args in self.calls:
            run(*args)


@pytest.fixture(scope="module")
def step() -> Step:
    torch.set_num_threads(1)
    return Step()


@torch.no_grad()
@pytest.mark.parametrize("way", STEPS)
def test_one_step(way: str, step: Step, benchmark: Any) -> None:
    run: dict[str, Callable[[], Any]] = {
        "calls themselves": step.run_calls,
        "replayed": step.captured.replay,
        "split graph": lambda: step.program.run(step.args),
        "torch.compile": lambda: step.plain(step.x),
    }
    benchmark.pedantic(run[way], rounds=300, iterations=5, warmup_rounds=20)
    if benchmark.stats is not None:
        RESULTS[way] = benchmark.stats.stats.min * 1e6  # the machine's other work only ever adds


@dataclass(frozen=True)
class Metadata:
    """As much as a paged attention backend has."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    plan: tuple[int, ...]


@pytest.mark.parametrize("way", VIEWS)
def test_a_fingerprint(way: str, benchmark: Any) -> None:
    """Comparing one group's metadata with what was recorded, before a replay."""
    buffers = [torch.zeros(64, 8) for _ in range(6)]
    recorded = Metadata(*[b[:32] for b in buffers], plan=(1, 2, 3))
    fingerprint = Fingerprint.take(recorded, layer="layer", backend="backend", unrecorded=frozenset())
    now = recorded if way == "same views" else Metadata(*[b[:32] for b in buffers], plan=(1, 2, 3))
    benchmark.pedantic(fingerprint.check, args=(now,), rounds=300, iterations=50, warmup_rounds=20)
    if benchmark.stats is not None:
        RESULTS[f"fingerprint, {way}"] = benchmark.stats.stats.min * 1e6


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_a_start(start: str, artifact_folder: str, benchmark: Any) -> None:
    """From `torch.compile` to the first result, in a new process; imports and weights are not counted."""
    run = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"MRV2_CACHE_DIR": artifact_folder},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert set(found["sources"]) == ({"inductor"} if start == "cold" else {"disk"})
    RESULTS[f"{start} start"] = found["seconds"]
    benchmark.pedantic(lambda: None, rounds=1)


@pytest.fixture(scope="module")
def artifact_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_the_record_is_written() -> None:
    segments = 2 * NUM_LAYERS + 1
    assert {"calls themselves", "replayed", "cold start", "warm start"} <= RESULTS.keys(), "run the whole file"
    bookkeeping = (RESULTS["replayed"] - RESULTS["calls themselves"]) / segments
    path = write(
        "host_overhead",
        {
            "segments": segments,
            "step_us": {way: round(RESULTS[way], 1) for way in STEPS},
            "fingerprint_us_per_group": {way: round(RESULTS[f"fingerprint, {way}"], 2) for way in VIEWS},
            "replay_bookkeeping_us_per_segment": round(bookkeeping, 3),
            "split_graph_over_replayed": round(RESULTS["split graph"] / RESULTS["replayed"], 2),
            "torch_compile_over_replayed": round(RESULTS["torch.compile"] / RESULTS["replayed"], 2),
            "start_seconds": {way: round(RESULTS[f"{way} start"], 2) for way in ("cold", "warm")},
            "warm_over_cold": round(RESULTS["warm start"] / RESULTS["cold start"], 3),
            "started_model": "Llama, 12 layers, random, Inductor pieces",
        },
    )
    print(f"\n{path.read_text()}")
    assert bookkeeping < 2
    assert RESULTS["fingerprint, same views"] < 3, "the views that the backends here hand out are the same each step"


def start_a_model() -> None:
    """Compile a 12-layer Llama and print how long that took."""
    import time

    import torch._dynamo
    import torch._inductor.compile_fx
    from transformers import LlamaConfig, LlamaForCausalLM

    from piecewise_backend.backend import mrv2, reports

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.zeros(1, 16, dtype=torch.int64)
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        started = time.perf_counter()
        result = torch.compile(model, backend=mrv2)(ids, use_cache=False).logits
        seconds = time.perf_counter() - started
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    sources = [source for report in reports() for source in report.compiled.values()]
    print(json.dumps({"seconds": seconds, "sources": sources}))


if __name__ == "__main__":
    start_a_model()
