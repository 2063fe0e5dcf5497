"""Regions that a boundary may lie in: settings, modes, transforms, checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.piecewise_backend.operators import (
    COMPILERS,
    DYNAMIC,
    names,
    same_as_eager,
    sdpa_backends,
    seen_settings,
    settings,
    triple,
)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8)


@COMPILERS
def test_autocast_holds_in_every_part_of_its_region(x, compiler):
    def model(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = triple(x @ x.t())
            with torch.autocast("cpu", enabled=False):
                z = triple(y.float() @ y.float())
                inner = z @ z
            y = triple(y @ y)
        return y, inner, x @ x.t()

    same_as_eager(model, x, compiler=compiler)


@COMPILERS
def test_settings_hold_at_breakpoints_and_are_restored(x, compiler):
    def model(x):
        with torch.autocast("cpu", dtype=torch.float16):
            y = settings(x) + 1
            with torch.autocast("cpu", enabled=False):
                y = settings(y + 1)
            y = settings(y)
        torch.use_deterministic_algorithms(True)
        y = settings(y) * 2
        torch.use_deterministic_algorithms(False)
        return settings(y)

    seen_settings.clear()
    before = sdpa_backends()
    same_as_eager(model, x, splitting_ops=("probe::settings",), compiler=compiler)
    assert len(seen_settings) == 10
    assert seen_settings[:5] == seen_settings[5:], "eager first, then compiled"
    assert not torch.are_deterministic_algorithms_enabled()
    assert sdpa_backends() == before


def test_the_chosen_attention_kernels_are_chosen_where_attention_runs(x, monkeypatch):
    def model(x):
        q = x.view(1, 2, -1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, q, q)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            y = F.scaled_dot_product_attention(y, q, q)
        return F.scaled_dot_product_attention(y, q, q) + 1

    chosen = []
    (program,) = same_as_eager(model, x)
    assert names(program) == ["piece", *["aten::scaled_dot_product_attention"] * 3, "piece"]

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                chosen.append(sdpa_backends())
            return func(*args, **(kwargs or {}))

    ambient = sdpa_backends()
    with Watch():
        program.run([x])
    assert chosen == [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ambient]
    assert sdpa_backends() == ambient


@COMPILERS
def test_switches_of_grad_and_inference_mode_straddle_no_boundary(x, compiler):
    def model(x):
        with torch.no_grad():
            y = triple(x + 1)
        with torch.inference_mode():
            z = triple(y + 2)
        return z * 2

    (program,) = same_as_eager(model, x, compiler=compiler)
    assert names(program) == ["piece", "probe::triple", "piece", "probe::triple", "piece"]


@COMPILERS
def test_a_function_transform_is_not_cut_apart(x, compiler):
    def model(x):
        y = torch.vmap(torch.vmap(lambda row: row.sin() + 1))(triple(x))
        return triple(torch.vmap(lambda row: row + row.sum())(y)) * 2

    (program,) = same_as_eager(model, x, compiler=compiler)
    assert names(program) == ["probe::triple", "piece", "probe::triple", "piece"]


@COMPILERS
@DYNAMIC
def test_breakpoints_inside_checkpoints_and_compile_regions_break(x, compiler, dynamic):
    @torch.compiler.nested_compile_region
    def layer(x, w):
        y = triple(x @ w) + 1
        return y * 2, y.view(-1)

    def model(x, w, v):
        x, _ = checkpoint(lambda x, y: (triple(x.sin() + y), y * 2), x, x * 2, use_reentrant=False)
        a, flat = layer(x, w)
        b, other = layer(a, v)
        other.add_(1)
        return a, b, flat, triple(other)

    (program,) = same_as_eager(model, x, torch.randn(8, 8), torch.randn(8, 8), compiler=compiler, dynamic=dynamic)
    assert names(program).count("probe::triple") == 4
