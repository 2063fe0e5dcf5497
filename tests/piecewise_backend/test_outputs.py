import pytest
import torch

from tests.piecewise_backend.calling import Compiled

SIZES = (5, 8, 6, 5)


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def check(model, *more: torch.Tensor, sizes=SIZES, **options):
    """Values, strides and sharing of memory as in eager at every call; returns the compiled model."""
    compiled = Compiled(model, **{"capture_sizes": (8,)} | options)
    for n in sizes:
        x = torch.randn(n, 4)
        results, expected = compiled(x, *more), model(x, *more)
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got, want)
            if isinstance(want, torch.Tensor) and want.numel() > 1:
                assert got.stride() == want.stride()
        tensors = [(g, w) for g, w in zip(results, expected, strict=True) if isinstance(w, torch.Tensor)]
        for i, (got, want) in enumerate(tensors):
            assert (storage(got) == storage(x)) == (storage(want) == storage(x))
            for other, other_want in tensors[i + 1 :]:
                assert (storage(got) == storage(other)) == (storage(want) == storage(other_want))
    assert compiled.report.num_replays >= 1
    return compiled


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x + 1, x * 2),
        lambda x: (h := x + 1, h.t()),
        lambda x: (h := x + 1, h[:, 1:3], h.view(-1)),
        lambda x: (h := x.t().contiguous(), h.t(), h[1]),
        lambda x: ((x + 1)[:, :2],),
        lambda x: ((x + 1)[:, None].expand(-1, 3, 4),),
        lambda x: (h := x + 1, h[:, None].expand(-1, 3, 4)),
        lambda x: (h := x + 1, h.view(torch.int32)),
        lambda x: (h := x + 1, h.unbind(-1)[2]),
        lambda x: (x.half(), x > 0, x.argmax(-1), (x + 1).double()),
        lambda x: (h := x + 1, h),
    ],
    ids=range(11),
)
def test_results_have_the_values_strides_and_sharing_of_eager(model):
    check(model)


@pytest.mark.parametrize(
    "model",
    [lambda x: (x.t(), x + 1), lambda x: (x[:, 1:3], x + 1), lambda x: (x.view(-1)[2:], x + 1), lambda x: (x, x + 1)],
    ids=range(4),
)
def test_a_view_of_an_input_lies_in_the_callers_own_tensor(model):
    check(model)


def test_a_view_of_written_memory_lies_in_the_callers_own_tensor():
    cache = torch.zeros(3, 4)

    def model(x, cache):
        cache.add_(1)
        return x + 1, cache, cache[1:].t()

    compiled = Compiled(model, capture_sizes=(8,))
    for call in range(1, 4):
        _, whole, part = compiled(torch.randn(5, 4), cache)
        assert storage(whole) == storage(part) == storage(cache)
        assert part.shape == (4, 2)
        assert bool((part == call).all())


def test_numbers_and_constants_are_those_of_the_real_size():
    def model(x):
        return x.shape[0], x.shape[0] * 2 + 1, None, 3, x + 1, (x.shape[0] + 1) // 2

    check(model)


def test_results_that_share_memory_are_the_callers_own_at_every_call():
    compiled = Compiled(lambda x: (h := x + 1, h.t()), capture_sizes=(8,))
    kept = []
    for _ in range(3):
        x = torch.randn(5, 4)
        a, b = compiled(x)
        kept.append((a, b, x + 1))
    assert len({storage(a) for a, _, _ in kept}) == 3
    for a, b, expected in kept:
        torch.testing.assert_close(a, expected)
        torch.testing.assert_close(b, expected.t())


def test_a_result_without_elements_is_handed_out():
    check(lambda x: (x[:, 4:], x + 1, x.new_zeros(0)))
