import pytest
import torch
import torch.nn.functional as F

from piecewise_backend.padding import close, same
from piecewise_backend.reasons import ReasonCode
from tests.piecewise_backend.calling import Compiled

TABLE = torch.randn(16, 4)


def run(model, *calls, dynamic=(0,), **options) -> Compiled:
    """Check each call; sizes may be padded to 8."""
    compiled = Compiled(model, **{"capture_sizes": (8,)} | options)
    for args in calls:
        expected = model(*[a.clone() for a in args])
        torch.testing.assert_close(compiled(*args, dynamic=dynamic), expected)
    return compiled


ROW_WISE = [
    lambda x: F.layer_norm(x, (4,)),
    lambda x: x.softmax(-1) @ TABLE[:4],
    lambda x: x[:, None].expand(-1, 3, -1).sum(1),
    lambda x: torch.cumsum(x, 0),  # padded rows come last, so no real row sees them
    lambda x: x.view(-1),
    lambda x: (x.shape[0], x + 1),
]
CROSS_ROW = [
    lambda x: x - x.mean(0),
    lambda x: x.flip(0),
    lambda x: torch.roll(x, 1, 0),
    lambda x: x.sort(0)[0],
    lambda x: x * x.shape[0],
    lambda x: x + x[-1],
    lambda x: torch.where(x.max() > 0, x, -x),
    lambda x: x + (x > 1e6).any(),
    lambda x: torch.where(x[0, 0] > 0, x, x.flip(0)),
    lambda x: x.nan_to_num().clamp(-1, 1).sum(0),
]


@pytest.mark.parametrize("model", ROW_WISE)
def test_a_model_whose_rows_stand_alone_is_padded(model):
    compiled = run(model, *[(torch.randn(n, 4),) for n in (5, 6, 5)])
    assert compiled.report.num_captures == 1
    assert sum(s.padded_rows for s in compiled.report.sizes) == 2 + 3
    assert ReasonCode.CROSS_ROW not in compiled.codes


@pytest.mark.parametrize("model", CROSS_ROW)
def test_a_model_whose_rows_see_each_other_is_captured_exactly_with_its_reason(model):
    compiled = run(model, *[(torch.randn(n, 4),) for n in (5, 6, 5, 6)])
    assert sum(s.padded_rows for s in compiled.report.sizes) == 0
    assert compiled.report.num_replays >= 1
    assert ReasonCode.CROSS_ROW in compiled.codes


@pytest.mark.parametrize("model", CROSS_ROW)
def test_a_warm_up_of_zeros_proves_nothing(model):
    x = torch.randn(5, 4)
    run(model, (torch.zeros(5, 4),), (x,), (-x,), (torch.randn(6, 4),))


@pytest.mark.parametrize(
    "model",
    [
        lambda ids: TABLE[ids] * ids.sum(),
        lambda ids: TABLE[ids] + ids.float().mean(),
        lambda ids: TABLE[ids] + (ids == 0).sum(),
    ],
)
@pytest.mark.parametrize("first", [[0, 0, 0, 0, 0], [0, 3, 5, 7, 0], [2, 2, 2, 2, 2]])
def test_integers_that_rows_share_are_found_out_whatever_the_first_call_held(model, first):
    run(model, (torch.tensor(first),), (torch.tensor([1, 2, 3, 4, 5]),), (torch.tensor([5, 0, 9, 4, 0]),))


def test_integers_that_are_all_zero_are_captured_exactly_until_others_come():
    def model(ids):
        return TABLE[ids]

    compiled = run(model, *[(torch.zeros(5, dtype=torch.int64),)] * 2, (torch.tensor([1, 2, 3, 4]),))
    assert [s.descriptor for s in compiled.report.sizes] == ["FULL, exactly 5 rows", "FULL, 8 rows"]
    assert "all of it is 0" in compiled.detail(ReasonCode.CROSS_ROW)
    vouched = run(model, *[(torch.zeros(5, dtype=torch.int64),)] * 2, padding="zero")
    assert [s.num_tokens for s in vouched.report.sizes] == [8]


def test_a_declared_rule_says_what_padded_rows_hold():
    def model(x):
        return x + x.sum(0)

    compiled = run(model, (torch.randn(5, 4),), (torch.randn(8, 4),), (torch.randn(6, 4),), padding={"x": "zero"})
    assert compiled.report.num_captures == 1  # a sum over rows of zeros more is the same sum
    assert compiled.report.num_replays == 2


@pytest.mark.parametrize("rule", ["zero", "repeat_last", "leave", "minus_one"])
def test_every_rule_gives_the_right_rows(rule):
    compiled = run(
        lambda x, mask: torch.where(mask[:, None], x, -x),
        *[(torch.randn(n, 4), torch.rand(n) > 0.5) for n in (5, 7, 8, 5)],
        padding=rule, dynamic=(0, 1),
    )  # fmt: skip
    assert compiled.report.num_captures == 1


def test_padded_rows_of_nan_do_not_reach_real_rows():
    """R37"""
    from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint

    @torch.library.custom_op("padding::center", mutates_args=())
    def center(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)

    center.register_fake(torch.empty_like)
    register_breakpoint(center)
    try:
        compiled = Compiled(lambda x: center(x * 2) + 1, capture_sizes=(8,))
        for n in (5, 7, 6):
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x), x * 2 - (x * 2).mean(0) + 1)
            for buffer in compiled.caller._by_target.values():
                buffer.static.args[compiled.caller.copied[0]].fill_(float("nan"))
    finally:
        unregister_breakpoint(center)
    assert compiled.report.num_captures == 1
    assert compiled.report.num_replays == 2


def test_what_an_operator_given_real_rows_leaves_in_padded_ones_is_not_taken_for_zeros():
    from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint

    @torch.library.custom_op("padding::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("padding::write", mutates_args=("out",))
    def write(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 3)

    def model(x):
        out = torch.zeros_like(x)
        write(x, out)
        return x, twice(x).sum(0), out.sum(0)

    twice.register_fake(torch.empty_like)
    write.register_fake(lambda x, out: None)
    register_breakpoint(twice)
    register_breakpoint(write)
    try:
        compiled = run(model, *[(torch.randn(n, 4),) for n in (5, 8, 5, 7, 5)])
    finally:
        unregister_breakpoint(twice)
        unregister_breakpoint(write)
    assert ReasonCode.CROSS_ROW in compiled.codes


def test_the_proof_leaves_written_memory_as_it_was():
    cache = torch.zeros(3, 4)

    def model(x, cache):
        cache.add_(1)
        return x + cache[0]

    compiled = Compiled(model, capture_sizes=(8,))
    for call in range(1, 4):
        x = torch.randn(5, 4)
        torch.testing.assert_close(compiled(x, cache), x + call)
        assert float(cache[0, 0]) == call
    assert compiled.report.num_replays == 2


def test_a_write_that_depends_on_padded_rows_is_found_out():
    total = torch.zeros(4)

    def model(x, total):
        total.add_(x.nan_to_num().clamp(-1, 1).sum(0))
        return x + 1

    compiled = Compiled(model, capture_sizes=(8,))
    expected = torch.zeros(4)
    for _ in range(3):
        x = torch.randn(5, 4)
        compiled(x, total)
        expected += x.clamp(-1, 1).sum(0)
        torch.testing.assert_close(total, expected)
    assert "written input" in compiled.detail(ReasonCode.CROSS_ROW)


def test_what_was_proved_by_chance_for_another_size_is_taken_back():
    def model(x):
        return x * max(1, x.shape[0] - 8)

    compiled = Compiled(model, capture_sizes=(4, 16), max_padding_waste=1.0)
    for n in (3, 12, 3, 12, 3):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), model(x))


def test_random_numbers_of_the_caller_are_not_used_up_by_the_proof():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(8,))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    compiled(torch.zeros(5, 4))
    assert torch.rand(1) == expected


def test_a_model_that_fails_on_padded_rows_is_captured_exactly():
    def model(x):
        return TABLE[x[:, 0].abs().long() % 16 * (x[:, 0] == x[:, 0]).long() + (x[:, 0] != x[:, 0]).long() * 99]

    compiled = run(model, *[(torch.randn(5, 4),)] * 3)
    assert "does not run on padded rows (IndexError" in compiled.detail(ReasonCode.CROSS_ROW)
    assert compiled.report.num_replays >= 1


def test_same_means_the_same_bits_and_close_allows_for_rounding():
    a = torch.tensor([1.0, float("nan")])
    assert same(a, a.clone())
    assert not same(a, a + 1e-6)
    assert close(a, a + 1e-6)
    assert not close(a, torch.tensor([1.0, 2.0]))
    assert not close(torch.zeros(2), torch.zeros(3))
