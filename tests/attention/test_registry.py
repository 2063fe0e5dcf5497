"""Which backend runs a layer, and why not another."""

from typing import Any

import pytest
import torch

from attention.backends.pytorch import TorchAttentionImpl, TorchBackend, TorchMetadataBuilder
from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder
from attention.groups import init_attn_backend
from attention.registry import choose_backend, get_backend, register_backend
from attention.specs import AttentionSpec

CPU = torch.device("cpu")


def spec(**changes: Any) -> AttentionSpec:
    facts = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 16, "dtype": torch.float32, "scale": 0.1}
    return AttentionSpec(**facts | changes)


class Picky(TorchBackend):
    name = "picky"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        return None if spec.head_size == 64 else f"head size {spec.head_size} is not 64"


class SilentBuilder(MetadataBuilder[Any]):
    def build(self, common: Any, *, for_capture: bool) -> Any:
        return None


class Silent(AttentionBackend):
    """A third party's, which does not say what it supports."""

    name = "silent"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder[Any]]:
        return SilentBuilder

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        return TorchAttentionImpl


@pytest.fixture
def preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.registry._BACKENDS", {"attention": {"torch": TorchBackend}})
    monkeypatch.setattr("attention.registry._PREFERENCE", {"cpu": ("missing", "picky", "torch")})
    register_backend("picky", Picky)
    register_backend("missing", "no_such_library.backend:Backend")


@pytest.mark.usefixtures("preference")
def test_a_backend_that_lacks_a_head_size_is_passed_over_with_its_reason() -> None:
    choice = choose_backend(spec(head_size=80), CPU)
    assert choice.backend is TorchBackend
    assert dict(choice.passed_over)["picky"] == "head size 80 is not 64"
    assert "not importable here" in dict(choice.passed_over)["missing"]


@pytest.mark.usefixtures("preference")
def test_the_first_backend_that_can_is_taken() -> None:
    assert choose_backend(spec(), CPU).backend is Picky


@pytest.mark.usefixtures("preference")
def test_a_forced_backend_that_cannot_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'picky' cannot run this model: head size 80 is not 64\. Leave the backend"):
        choose_backend(spec(head_size=80), CPU, forced="picky")


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'tritn'.*did you mean 'triton'"):
        get_backend("tritn")


def test_layers_of_one_spec_share_a_group_and_the_least_support_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class DecodeOnly(TorchMetadataBuilder):
        def get_cudagraph_support(self) -> AttentionCGSupport:
            """R30: asked of the builder with its own spec, not of the backend's class."""
            few = self.spec.num_heads <= 4
            return AttentionCGSupport.ALWAYS if few else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: DecodeOnly))
    specs = {"a": spec(), "b": spec(), "draft": spec(num_heads=8)}
    groups, support, _ = init_attn_backend(specs, max_num_reqs=2, max_num_tokens=8, max_model_len=32, device=CPU)
    assert [g.layer_names for g in groups] == [("a", "b"), ("draft",)]
    assert support.min_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support.set_by == "torch"


def test_a_backend_that_does_not_declare_its_support_is_never_recorded_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R32."""
    monkeypatch.setattr("attention.registry._BACKENDS", {"attention": {"silent": Silent}})
    _, support, _ = init_attn_backend(
        {"a": spec()}, max_num_reqs=2, max_num_tokens=8, max_model_len=32, device=CPU, forced="silent"
    )
    assert support.min_support is AttentionCGSupport.NEVER
    assert "'silent' does not declare cudagraph_support" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 3}, "multiple of num_kv_heads"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ({"soft_cap": 0.0}, "soft_cap must be finite and above 0"),
    ],
)
def test_an_impossible_spec_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**wrong)
