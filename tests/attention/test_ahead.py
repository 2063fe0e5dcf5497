"""Kernels compiled ahead of their launches."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading

import pytest
import torch

from attention.base import AttentionImpl
from attention.kernels.ahead import KernelsAhead, without_memory
from tests.attention.backend_cases import SPEC, make
from tests.attention.oracle import PagedBatch

pytest.importorskip("triton", reason="compiles with Triton")


class Kernel:
    """Stands for a JIT function."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.warmed: list[object] = []

    def warmup(self, *arguments: object, **constants: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if self.error is not None:
            raise self.error
        self.warmed.append((arguments, constants))


def test_all_kernels_are_compiled_by_another_thread_when_the_wait_is_over() -> None:
    kernels, ahead = [Kernel(), Kernel()], KernelsAhead()
    x = torch.empty(3, dtype=torch.bfloat16)
    for kernel in kernels:
        ahead.compile([(kernel, (4,), (x, 7), {"BLOCK": 16})])
    ahead.wait()
    for kernel in kernels:
        assert kernel.warmed == [((torch.bfloat16, 7), {"grid": (4,), "BLOCK": 16})]
    ahead.wait()  # nothing to wait for
    ahead.compile([(kernels[0], (4,), (x, 8), {})])
    ahead.wait()
    assert len(kernels[0].warmed) == 2


def test_a_kernel_that_does_not_compile_is_logged_and_the_others_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    good, ahead = Kernel(), KernelsAhead()
    with caplog.at_level(logging.WARNING):
        ahead.compile([(Kernel(ValueError("no such tile")), (1,), (), {}), (good, (1,), (), {})])
        ahead.wait()
    assert good.warmed
    assert "no such tile" in caplog.text


def test_a_traced_tensor_is_laid_out_alike_without_memory() -> None:
    shapes: list[torch.Tensor] = []

    def look(gm, _):
        fakes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "call_function"]
        shapes.extend(without_memory(fake) for fake in fakes)
        return gm

    x = torch.randn(6, 8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x[:, 2:4] + 1, backend=look, fullgraph=True)(x)
    assert [(t.shape, t.stride(), t.device.type) for t in shapes] == [
        ((6, 2, 4), (32, 4, 1), "meta"),
        ((6, 2, 4), (8, 4, 1), "meta"),
    ]


@pytest.mark.parametrize("group", [1, 3, 4, 32])
@pytest.mark.parametrize("max_num_tokens", [1, 40, 2048])
def test_every_kernel_of_attention_is_among_those_compiled_ahead(group: int, max_num_tokens: int) -> None:
    spec = dataclasses.replace(SPEC, num_heads=2 * group, num_kv_heads=2)
    batch = PagedBatch(spec, num_tokens=max_num_tokens, num_reqs=max_num_tokens, max_model_len=1024)
    builder, impl = make("triton", spec, batch)
    batch.fill([(1, 1)])

    def kernels(launches):
        return {(kernel.fn.__name__, tuple(sorted(constants.items()))) for kernel, _, _, constants in launches}

    ahead = kernels(impl.launches_ahead(builder, batch.common(), batch.query, batch.kv_cache, batch.out))
    metadata = builder.build(batch.common(), for_capture=False)
    tokens = sorted({1, 2, 7, 39, 40, 300, 2048, max_num_tokens})
    for num_tokens, num_reqs, longest, keys in itertools.product(tokens, tokens, tokens, (1, 100, 1024)):
        if max(num_reqs, longest) <= num_tokens <= max_num_tokens:
            plan = builder.plan(num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=longest, max_seq_len=keys)
            like = dataclasses.replace(metadata, plan=plan)
            assert kernels(impl._launches(batch.query, batch.kv_cache, like, batch.out)) <= ahead


def test_a_backend_without_kernels_of_its_own_has_none_ahead() -> None:
    batch = PagedBatch(SPEC, num_tokens=2, num_reqs=1, max_model_len=32)
    builder, impl = make("torch", SPEC, batch)
    batch.fill([(1, 1)])
    assert isinstance(impl, AttentionImpl)
    assert not impl.launches_ahead(builder, batch.common(), batch.query, batch.kv_cache, batch.out)
