import gc
import weakref
from typing import Any

import pytest
import torch

from piecewise_backend.breakpoints import Breakpoint
from piecewise_backend.cudagraph.capture import Padded, Step, capture, capture_session
from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.cudagraph.rows import RealRows, TokenDim
from piecewise_backend.facts import Forbidden

KEPT = Breakpoint(name="test::op", owns_metadata=True)


def step(run, inputs, outputs, *, breaks=False, launches=True, frees=(), **more: Any) -> Step:
    return Step(
        name="op" if breaks else "piece", run=run, inputs=inputs, outputs=outputs, frees=frees, opaque=False,
        launches=launches, breakpoint=KEPT if breaks else None, forbidden=None, **more,
    )  # fmt: skip


def walk(steps, args, outputs, *, slots=8, records=False, recorder=None, padded=None):
    return capture(
        steps, [*args, *[None] * (slots - len(args))], outputs, recorder=recorder or EmulatedRecorder(),
        records=lambda s: records, execute=True, padded=padded,
    )  # fmt: skip


CHAIN = [
    step(lambda a: (a + 1,), (0,), (1,)),
    step(lambda a: (a * 2,), (1,), (2,), breaks=True, frees=(1,)),
    step(lambda a: (a - 3,), (2,), (3,), frees=(2,)),
]


@pytest.mark.parametrize(("records", "graphs", "calls"), [(False, 2, 3), (True, 1, 1)])
def test_a_breakpoint_is_recorded_into_the_open_graph_or_breaks_it(records, graphs, calls):
    x = torch.randn(4)
    captured = walk(CHAIN, [x], [3], records=records)
    assert captured.num_graphs == graphs
    assert len(captured.calls) == calls
    assert (captured.recorded, captured.eager) == ((("op",), ()) if records else ((), ("op",)))
    for _ in range(2):
        x.copy_(torch.randn(4))
        (result,) = captured.replay()
        torch.testing.assert_close(result, (x + 1) * 2 - 3)


def test_the_walk_does_the_work_once():
    count = torch.zeros(1)
    steps = [
        step(lambda c: (c.add_(1),), (0,), (1,)),
        step(lambda c: (c.add_(10),), (0,), (2,), breaks=True),
        step(lambda c: (c.mul_(2),), (0,), (3,)),
    ]
    captured = walk(steps, [count], [0])
    assert count.item() == (0 + 1 + 10) * 2
    captured.replay()
    assert count.item() == (22 + 1 + 10) * 2


def test_a_fresh_result_of_an_eager_step_lies_where_it_lay_at_capture():
    x = torch.randn(4)
    captured = walk(CHAIN[:2], [x], [2])
    address = captured.outputs[0].data_ptr()
    for _ in range(2):
        x.copy_(torch.randn(4))
        assert captured.replay()[0].data_ptr() == address
        torch.testing.assert_close(captured.outputs[0], (x + 1) * 2)


def test_an_eager_step_may_return_expanded_shared_and_empty_results():
    x = torch.randn(4, 1)

    def run(a):
        b = a * 2
        return b, b.expand(4, 3), b.t(), b[:0], 7

    captured = walk([step(run, (0,), (1, 2, 3, 4, 5), breaks=True)], [x], [1, 2, 3, 4, 5])
    x.copy_(torch.randn(4, 1))
    for got, want in zip(captured.replay(), run(x), strict=True):
        assert got == want if isinstance(want, int) else torch.equal(got, want)


def test_a_step_that_launches_nothing_makes_no_graph():
    """R03"""
    x = torch.randn(4)
    steps = [
        step(lambda a: (a.view(2, 2), torch.empty(2, 2)), (0,), (1, 2), launches=False),
        step(lambda a, out: (out.copy_(a), ())[1], (1, 2), (), breaks=True),
        step(lambda out: (out.t(),), (2,), (3,), launches=False),
        step(lambda a: (a + 1,), (3,), (4,), breaks=True),
    ]
    captured = walk(steps, [x], [4])
    assert captured.num_graphs == 0
    x.copy_(torch.randn(4))
    torch.testing.assert_close(captured.replay()[0], x.view(2, 2).t() + 1)


def test_a_piece_with_a_forbidden_operator_runs_between_the_graphs():
    import dataclasses

    middle = dataclasses.replace(CHAIN[1], breakpoint=None, name="piece 1", forbidden=Forbidden("item", "host", "line"))
    captured = walk([CHAIN[0], middle, CHAIN[2]], [torch.randn(4)], [3], records=True)
    assert captured.num_graphs == 2
    assert captured.eager == ("piece 1",)


def test_an_error_drops_the_open_graph_and_the_next_capture_works():
    recorder = EmulatedRecorder()

    def fails(a):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        walk([CHAIN[0], step(fails, (1,), (2,))], [torch.randn(4)], [2], recorder=recorder)
    assert walk(CHAIN, [torch.randn(4)], [3], recorder=recorder).num_graphs == 2


def test_a_value_read_after_other_graphs_were_recorded_keeps_its_memory():
    steps = [
        step(lambda a: (a + 1, a * 5), (0,), (1, 2)),
        step(lambda a: (a * 2,), (1,), (3,), breaks=True, frees=(1,)),
        step(lambda a: (a - 3,), (3,), (4,), frees=(3,)),
        step(lambda a: (a * 2,), (4,), (5,), breaks=True, frees=(4,)),
        step(lambda a, b: (a + b,), (5, 2), (6,), frees=(5, 2)),
    ]
    x = torch.randn(4)
    captured = walk(steps, [x], [6])
    for _ in range(2):
        x.copy_(torch.randn(4))
        torch.testing.assert_close(captured.replay()[0], ((x + 1) * 2 - 3) * 2 + x * 5)


def test_an_operator_without_metadata_is_given_the_real_rows_only():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.empty(5, 3), symbolic_context=context)
    dim = TokenDim(fake.shape[0].node.expr.free_symbols)
    seen = []

    def center(a):
        seen.append(a.shape[0])
        return (a - a.mean(0),)

    op = Step(
        name="center", run=center, inputs=(0,), outputs=(1,), frees=(), opaque=False, launches=True,
        breakpoint=Breakpoint(name="test::center"), forbidden=None, input_fakes=(fake,), output_fakes=(fake,),
    )  # fmt: skip
    x, rows = torch.full((8, 3), float("nan")), RealRows(5)
    x[:5] = torch.randn(5, 3)
    captured = walk([op], [x], [1], padded=Padded(dim, 8, rows))
    for rows.count in (5, 3, 7, 5):
        x[: rows.count] = torch.randn(rows.count, 3)
        (result,) = captured.replay()
        assert seen[-1] == rows.count
        torch.testing.assert_close(result[: rows.count], x[: rows.count] - x[: rows.count].mean(0))


def test_the_garbage_collector_rests_during_a_session_and_is_as_it_was_after_it():
    was = gc.isenabled()
    with capture_session(EmulatedRecorder()):
        assert not gc.isenabled()
    assert gc.isenabled() is was


def test_what_the_user_froze_stays_frozen_but_garbage_does_not_stay_with_it() -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    gc.freeze()
    try:
        garbage = weakref.ref(Circle())
        with capture_session(EmulatedRecorder()):
            pass
        assert gc.get_freeze_count()
        gc.collect()
        assert garbage() is None
    finally:
        gc.unfreeze()


def test_a_session_looks_for_no_garbage_which_takes_long_beside_a_model() -> None:
    collections: list[str] = []

    def note(phase: str, facts: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(note)
    try:
        with capture_session(EmulatedRecorder()):
            assert [[] for _ in range(10_000)]
            during = len(collections)
        gc.collect()
    finally:
        gc.callbacks.remove(note)
    assert (during, len(collections)) == (0, 2)
