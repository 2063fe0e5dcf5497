"""How much memory all graphs will take, told from a few of them; and which sizes to do without where that is too much.

The first graph of a kind fills the pool that later, smaller ones share; what those add grows about evenly with their
size, mostly by what the driver keeps for each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from piecewise_backend.cudagraph.modes import BatchDescriptor

_Kind = tuple[str, int | None]


def choose_probes(descriptors: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    """The variants to capture first: of each kind the two largest and the smallest, largest first over all."""
    found: set[BatchDescriptor] = set()
    for group in _by_kind(descriptors).values():
        found.update((*group[:2], group[-1]))
    return [d for d in descriptors if d in found]


def estimate_bytes(
    descriptors: Iterable[BatchDescriptor], measured: Mapping[BatchDescriptor, int]
) -> dict[BatchDescriptor, float]:
    """What each of `descriptors` will add, on a line through the second largest and the smallest one `measured` of its
    kind. A kind of which less was measured goes by what there is; nothing measured counts as nothing."""
    lines = {kind: _line([(d.num_tokens, measured[d]) for d in group]) for kind, group in _by_kind(measured).items()}
    return {d: max(0.0, lines[_kind(d)](d.num_tokens)) if _kind(d) in lines else 0.0 for d in descriptors}


def drop_to_fit(
    rest: Sequence[BatchDescriptor],
    captured: Iterable[BatchDescriptor],
    expected: Mapping[BatchDescriptor, float],
    bytes_left: float,
) -> list[BatchDescriptor]:
    """Those of `rest` to do without, so that the others take at most `bytes_left`: least beneficial first.

    A size is worth the rows that it saves: the batches it serves would else be padded to the next size. `captured`
    variants stay.
    """
    kept, fixed, dropped = list(rest), list(captured), []
    while kept and sum(expected[d] for d in kept) > bytes_left:
        worth = {d: _rows_saved(d, [*fixed, *kept]) for d in kept}
        least = min(kept, key=lambda d: (worth[d], d.num_tokens))
        kept.remove(least)
        dropped.append(least)
    return dropped


def _rows_saved(descriptor: BatchDescriptor, others: Iterable[BatchDescriptor]) -> float:
    """Share of rows that would be padding without this size, summed over the batches that it serves."""
    sizes = sorted({d.num_tokens for d in others if _kind(d) == _kind(descriptor)})
    place = sizes.index(descriptor.num_tokens)
    below = sizes[place - 1] if place else 0
    above = sizes[place + 1] if place + 1 < len(sizes) else 2 * descriptor.num_tokens
    return (descriptor.num_tokens - below) * (above - descriptor.num_tokens) / above


def _line(points: list[tuple[int, int]]) -> _Line:
    points = sorted(points)
    if len(points) > 2:
        points.pop()  # the largest has paid for the pool
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    return _Line(y0 - slope * x0, slope)


class _Line:
    def __init__(self, start: float, slope: float) -> None:
        self.start, self.slope = start, slope

    def __call__(self, x: float) -> float:
        return self.start + self.slope * x


def _kind(descriptor: BatchDescriptor) -> _Kind:
    return descriptor.mode.name, descriptor.uniform_query_len


def _by_kind(descriptors: Iterable[BatchDescriptor]) -> dict[_Kind, list[BatchDescriptor]]:
    """Largest first within each kind."""
    found: dict[_Kind, list[BatchDescriptor]] = {}
    for descriptor in sorted(descriptors, key=lambda d: -d.num_tokens):
        found.setdefault(_kind(descriptor), []).append(descriptor)
    return found
