"""From a batch to its descriptor."""

from piecewise_backend.cudagraph.dispatch import Dispatcher
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode


def mixed(size: int) -> BatchDescriptor:
    return BatchDescriptor(mode=CUDAGraphMode.PIECEWISE, num_tokens=size)


def decode(size: int, query_len: int) -> BatchDescriptor:
    return BatchDescriptor(
        mode=CUDAGraphMode.FULL,
        num_tokens=size,
        num_reqs=size // query_len,
        uniform_query_len=query_len,
        max_query_len=query_len,
    )


def test_the_smallest_fitting_descriptor_serves_a_batch() -> None:
    dispatcher = Dispatcher([mixed(8), mixed(1), mixed(4)])
    found = [dispatcher.dispatch(n, 1) for n in range(1, 10)]
    assert [d.num_tokens if d else None for d in found] == [1, 4, 4, 4, 8, 8, 8, 8, None]


def test_a_fitting_full_descriptor_wins_over_a_smaller_piecewise_one() -> None:
    """R27: query length 3; every batch of 1 to 8 requests."""
    sizes = [1, 2, 4, 8, 16, 24]
    dispatcher = Dispatcher([*map(mixed, sizes), *(decode(n, 3) for n in (3, 6, 9, 18, 24))])
    for requests in range(1, 9):
        found = dispatcher.dispatch(3 * requests, requests, uniform_query_len=3)
        assert found.mode is CUDAGraphMode.FULL
        assert found.num_reqs >= requests


def test_a_batch_that_is_no_decode_by_state_is_never_served_as_decode() -> None:
    """R25: the shape alone (4 tokens, query length 4) decides nothing."""
    dispatcher = Dispatcher([mixed(4), decode(4, 4)])
    assert dispatcher.dispatch(4, 1, uniform_query_len=None) == mixed(4)
    assert dispatcher.dispatch(4, 1, uniform_query_len=4) == decode(4, 4)


def test_decode_of_another_query_length_falls_back_to_mixed() -> None:
    dispatcher = Dispatcher([mixed(8), decode(8, 4)])
    assert dispatcher.dispatch(6, 3, uniform_query_len=2) == mixed(8)


def test_nothing_captured_serves_nothing() -> None:
    assert Dispatcher([]).dispatch(1, 1, uniform_query_len=1) is None
