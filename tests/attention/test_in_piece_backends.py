"""Backends of operators that belong into pieces: they hand the runner's buffers on, and nothing else."""

import dataclasses

import pytest
import torch

from attention.backends.kv_compressor import KVCompressorBackend
from attention.backends.short_conv import ShortConvBackend
from attention.base import AttentionBackend, AttentionCGSupport
from attention.specs import KVCompressorSpec, LayerSpec, ShortConvSpec
from tests.attention.serving import SIZES, Batch, Chunk, skip_without_interpreter

CPU = torch.device("cpu")
both = pytest.mark.parametrize(
    ("backend", "spec"),
    [
        (ShortConvBackend, ShortConvSpec(dim=24, kernel_size=4, block_size=8, dtype=torch.float32)),
        (KVCompressorBackend, KVCompressorSpec(dim=24, ratio=4, block_size=8, dtype=torch.float32)),
    ],
    ids=["short_conv", "kv_compressor"],
)


@both
def test_the_backend_hands_the_runners_buffers_on_and_is_recordable_for_every_batch(
    backend: type[AttentionBackend], spec: LayerSpec
) -> None:
    batch = Batch(SIZES)
    batch.load([Chunk(sequence=0, start=0, length=3, right=3, slot=0)])
    builder = backend.get_builder_cls()(spec, max_num_reqs=4, max_num_tokens=36, max_model_len=40, device=CPU)
    common = batch.common()
    metadata = builder.build(common, for_capture=True)
    assert all(getattr(metadata, f.name) is getattr(common, f.name) for f in dataclasses.fields(metadata))
    assert builder.get_cudagraph_support() is AttentionCGSupport.ALWAYS
    assert backend.get_impl_cls() is None


@both
def test_the_backend_runs_on_the_cpu_and_says_why_not_elsewhere(
    backend: type[AttentionBackend], spec: LayerSpec
) -> None:
    assert backend.unsupported_reason(spec, CPU) is None
    assert "not on 'meta'" in (backend.unsupported_reason(spec, torch.device("meta")) or "")
    skip_without_interpreter()
    assert "interpreter is on" in (backend.unsupported_reason(spec, torch.device("cuda")) or "")
