"""What a piece looks like when Inductor gets it, with fake tensors of a GPU that need not be there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import ops
from piecewise_backend.lowering import lowered_for_gpu


def traced(function: Any, *shapes: tuple[int, ...], device: str = "cuda", dtypes: tuple[torch.dtype, ...] = ()):
    """`function` as a piece whose inputs have these shapes; half precision unless told."""
    module = fx.symbolic_trace(function)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    with FakeTensorMode():
        for node, shape, dtype in zip(inputs, shapes, dtypes or (torch.bfloat16,) * len(shapes), strict=True):
            node.meta["example_value"] = torch.empty(shape, device=device, dtype=dtype)
    return module


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def with_bias(x: Any, w: Any, b: Any) -> Any:
    return (F.linear(x, w, b),)


def without_bias(x: Any, w: Any) -> Any:
    return (F.linear(x, w),)


def test_a_product_on_a_gpu_becomes_our_operator_and_the_piece_stays_as_it_was() -> None:
    for piece in (traced(with_bias, (3, 8), (4, 8), (4,)), traced(without_bias, (3, 8), (4, 8))):
        before = targets(piece)
        lowered = lowered_for_gpu(piece, {})
        assert targets(lowered) == [ops.linear.default]
        assert targets(piece) == before
        shapes = [(3, 8), (4, 8), (4,)][: len(piece.graph.find_nodes(op="placeholder"))]
        real = [torch.randn(shape) for shape in shapes]
        torch.testing.assert_close(lowered(*real), piece(*real))


SLOTS = torch.tensor([5, -1, 16, 3, -1, 47, 0])


def write_kv(key: Any, value: Any, cache: Any, slots: Any) -> Any:
    torch.ops.mrv2.write_kv_cache(key, value, cache, slots)
    return ()


def write_rows(value: Any, cache: Any, slots: Any) -> Any:
    torch.ops.mrv2.write_cache(value, cache, slots)
    return ()


def on_the_cpu(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        node.kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in node.kwargs.items()}
    module.recompile()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_land_where_the_operator_puts_them(dtype: torch.dtype) -> None:
    dtypes = (torch.float32, torch.float32, dtype, torch.int64)
    piece = traced(write_kv, (6, 2, 8), (6, 2, 8), (4, 2, 16, 2, 8), (7,), dtypes=dtypes)
    lowered = on_the_cpu(lowered_for_gpu(piece, {}))
    key, value = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    by_operator, by_parts = (torch.full((4, 2, 16, 2, 8), 7.0, dtype=dtype) for _ in range(2))
    ops.write_kv_cache(key, value, by_operator, SLOTS)
    lowered(key, value, by_parts, SLOTS)
    assert torch.equal(by_operator[:3], by_parts[:3])
    assert (by_operator != 7).any(dim=-1).sum() == 2 * 2 * 4, "four real tokens"


def test_rows_of_any_shape_land_where_the_operator_puts_them() -> None:
    dtypes = (torch.float32, torch.float32, torch.int64)
    lowered = on_the_cpu(lowered_for_gpu(traced(write_rows, (7, 5), (4, 16, 5), (7,), dtypes=dtypes), {}))
    value = torch.randn(7, 5)
    by_operator, by_parts = (torch.zeros(4, 16, 5) for _ in range(2))
    ops.write_cache(value, by_operator, SLOTS)
    lowered(value, by_parts, SLOTS)
    assert torch.equal(by_operator[:3], by_parts[:3])
    assert by_parts[3, :15].eq(0).all(), "padded tokens write to one entry"


def test_everything_put_into_a_piece_may_be_kept_on_disk() -> None:
    """PyTorch's cache of compiled graphs passes over a graph with any function that it does not know."""
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    for piece in (
        traced(with_bias, (3, 8), (4, 8), (4,)),
        traced(write_kv, (6, 2, 8), (6, 2, 8), (4, 2, 16, 2, 8), (7,)),
        traced(write_rows, (7, 5), (4, 16, 5), (7,)),
    ):
        check_cacheable(lowered_for_gpu(piece, {}))


def test_on_the_cpu_nothing_is_changed() -> None:
    piece = traced(with_bias, (3, 8), (4, 8), (4,), device="cpu")
    assert lowered_for_gpu(piece, {}) is piece


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.bfloat16, torch.float32)])
def test_products_of_other_dtypes_stay_inductors(dtypes: tuple[torch.dtype, ...]) -> None:
    piece = traced(with_bias, (3, 8), (4, 8), (4,), dtypes=dtypes)
    assert targets(lowered_for_gpu(piece, {})) == targets(piece)


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_products_stay_inductors_where_it_is_to_choose_among_kernels(option: str) -> None:
    piece = traced(without_bias, (3, 8), (4, 8))
    assert targets(lowered_for_gpu(piece, {option: True})) == targets(piece)
    assert targets(lowered_for_gpu(piece, {option: False})) == [ops.linear.default]


def test_products_in_an_autocast_region_stay_inductors() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mode = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cuda", torch.float16, True, None))
    y = graph.call_function(F.linear, (x, w))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    graph.output((y,))
    with FakeTensorMode():
        for node, shape in ((x, (3, 8)), (w, (4, 8))):
            node.meta["example_value"] = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    module = fx.GraphModule({}, graph)
    assert targets(lowered_for_gpu(module, {})) == targets(module)
