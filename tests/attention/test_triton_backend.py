"""The Triton backend on the CPU: what it reads, plans, refuses and binds."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from attention.base import AttentionCGSupport
from attention.registry import choose_backend, get_backend
from tests.attention.backend_cases import CPU, MAX_MODEL_LEN, SPEC, make, padded_batch, skip_without_interpreter


def test_triton_reads_no_key_that_every_query_of_a_request_has_out_of_its_window() -> None:
    """Blocks that have left the window may have been given to others."""
    batch = padded_batch("triton", SPEC, [(1, 256), (18, 250)])
    builder, impl = make("triton", SPEC, batch)
    for request, (query_len, seq_len) in enumerate([(1, 256), (18, 250)]):
        gone = (seq_len - query_len - 90 + 1) // SPEC.block_size
        assert gone > 0
        batch.kv_cache[batch.block_table[request, :gone].long()] = float("nan")
        batch.block_table[request, :gone] = 1 << 30
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    batch.assert_out_is_right()


def test_triton_is_capturable_for_every_batch_and_its_plan_depends_on_sizes_alone() -> None:
    batch = padded_batch("triton", SPEC, [(1, 5), (1, 200)])
    builder, _ = make("triton", SPEC, batch)
    assert builder.get_cudagraph_support() is AttentionCGSupport.ALWAYS
    before = builder.build(batch.common(max_query_len=8), for_capture=True).plan
    batch.fill([(5, 250), (2, 2)])
    assert builder.build(batch.common(max_query_len=8), for_capture=True).plan == before


def test_triton_splits_the_keys_of_small_batches_and_never_past_its_workspace() -> None:
    batch = padded_batch("triton", SPEC, [(1, 200)])
    builder, _ = make("triton", SPEC, batch)
    assert builder.build(batch.common(), for_capture=True).plan.num_splits > 1
    large: Any = type(builder)(
        SPEC, max_num_reqs=64, max_num_tokens=512, max_model_len=MAX_MODEL_LEN, device=batch.device
    )
    for num_reqs in (1, 3, 17, 64):
        for num_tokens in (num_reqs, 100, 512):
            for max_query_len in (1, 4, 33, 512):
                plan = large.plan(
                    num_tokens=num_tokens,
                    num_reqs=num_reqs,
                    max_query_len=max_query_len,
                    max_seq_len=MAX_MODEL_LEN,
                )
                real_tokens = min(num_tokens, num_reqs * max_query_len)
                if plan.num_splits > 1:
                    needed = real_tokens * SPEC.num_heads * plan.num_splits
                    assert needed <= large.partial_lse.shape[0] == large.partial_out.shape[0]
                    assert plan.num_query_blocks * SPEC.num_kv_heads <= len(large.arrivals)
    assert large.plan(num_tokens=64, num_reqs=64, max_query_len=1, max_seq_len=MAX_MODEL_LEN).num_splits == 1


def test_triton_remembers_a_bounded_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = padded_batch("triton", SPEC, [(1, 200)])
    builder, _ = make("triton", SPEC, batch)
    monkeypatch.setattr("attention.backends.triton.plan._MAX_PLANS", 3)

    def plan(num_reqs: int, max_seq_len: int = 200) -> Any:
        return builder.plan(num_tokens=num_reqs, num_reqs=num_reqs, max_query_len=1, max_seq_len=max_seq_len)

    assert plan(1) is plan(1) is plan(1, max_seq_len=201)
    assert plan(1) is not plan(2)
    found = [plan(num_reqs) for num_reqs in range(1, 9)]
    assert len(builder._plans) <= 3
    assert [plan(num_reqs) for num_reqs in range(1, 9)] == found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_size": 24}, "block_size must be a power of two of at least 16, got 24"),
        ({"block_size": 8}, "block_size must be a power of two of at least 16, got 8"),
        ({"head_size": 288}, "head_size must be at most 256, got 288"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": torch.bfloat16}, "interpreter"),
        ({"num_heads": 512}, "at most 128 query heads may share a KV head, got 256"),
    ],
    ids=str,
)
def test_triton_says_why_it_cannot_run_a_layer(change: dict[str, Any], why: str) -> None:
    skip_without_interpreter()
    reason = get_backend("triton").unsupported_reason(dataclasses.replace(SPEC, **change), CPU)
    assert reason is not None
    assert why in reason


def test_triton_runs_on_no_device_but_cuda_and_an_interpreted_cpu() -> None:
    skip_without_interpreter()
    backend = get_backend("triton")
    assert "not on 'meta'" in (backend.unsupported_reason(SPEC, torch.device("meta")) or "")
    assert "interpreter is on" in (backend.unsupported_reason(SPEC, torch.device("cuda")) or "")


def test_without_the_interpreter_the_triton_backend_is_importable_on_the_cpu_and_says_what_it_needs() -> None:
    pytest.importorskip("triton")
    program = (
        "import torch\n"
        "from attention.backends.triton import TritonBackend\n"
        "from attention.base import AttentionSpec\n"
        "shape = dict(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)\n"
        "spec = AttentionSpec(**shape, dtype=torch.float32, scale=1.0)\n"
        "print(TritonBackend.unsupported_reason(spec, torch.device('cpu')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "need a CUDA device" in result.stdout
    assert "TRITON_INTERPRET=1" in result.stdout


def test_the_cpu_gets_the_torch_backend_though_the_interpreter_is_on() -> None:
    assert choose_backend(SPEC, CPU).backend is get_backend("torch")


def test_launches_bound_to_their_tensors_follow_the_metadata_of_each_step() -> None:
    batch = padded_batch("triton", SPEC, [(1, 200), (1, 5)])
    builder, impl = make("triton", SPEC, batch)
    run = impl.bind(batch.query, batch.kv_cache, batch.out)
    for requests in ([(1, 200), (1, 5)], [(3, 7)], [(1, 90), (1, 33)]):
        batch.fill(requests)
        run(builder.build(batch.common(), for_capture=False))
        batch.assert_out_is_right()


def test_a_bound_launch_is_prepared_once_for_a_plan_and_anew_for_other_tensors() -> None:
    from attention.backends.triton.bound import BoundLaunches

    launched: list[tuple[object, ...]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: launched.append(("again", grid, *arguments))

    class Kernel:
        arg_names = ("x", "n", "SIZE")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(*arguments: object, **constants: object) -> Compiled:
                launched.append(("first", grid, len(arguments), *constants))
                return Compiled()

            return first

    @dataclasses.dataclass(frozen=True)
    class Metadata:
        plan: object
        x: torch.Tensor

    plan, x, y = object(), torch.zeros(2), torch.zeros(2)
    run = BoundLaunches(lambda m: [(Kernel(), (3,), (m.x, 7), {"SIZE": 16})], lambda m: (m.x,))
    for tensor in (x, x, y, y):
        run(Metadata(plan, tensor))
    assert [entry[0] for entry in launched] == ["first", "again", "first", "again"]
    assert launched[1] == ("again", (3,), x.data_ptr(), 7, 16)
    assert launched[3] == ("again", (3,), y.data_ptr(), 7, 16)
