"""Matrix products of the sizes to be recorded, called once by a thread while the host still traces or reads.

A library for matrix products chooses a kernel by size and loads each at its first call, which takes tens of
milliseconds instead of microseconds: over fifty sizes, seconds. Loading leaves Python alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from piecewise_backend.breakpoints import target_names

logger = logging.getLogger(__name__)

Place = tuple[int, int | None]
"""A linear layer's weight and bias, by their places among a graph's inputs."""


def find_products(graph: fx.Graph) -> tuple[Place, ...]:
    """The linear layers of a graph whose parameters are inputs of it."""
    inputs = {node: place for place, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and "aten::linear" in target_names(node.target) and not node.kwargs:
            weight, bias = (*node.args, None)[1:3]
            if weight in inputs and (bias is None or bias in inputs):
                found.append((inputs[weight], None if bias is None else inputs[bias]))
    return tuple(found)


class ProductsAhead:
    """`call` for the linear layers of a program as soon as they are known; at the end of the `with` all are through."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes`: numbers of rows."""
        self.sizes = sorted(set(sizes), reverse=True)
        self.device = device
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProductsAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def call(self, places: Sequence[Place], inputs: Sequence[Any]) -> None:
        """Begin; nothing is done where nothing is to be recorded, or not on a GPU. The second call does nothing: it is
        of the same layers."""
        if not self.sizes or self.device.type != "cuda" or self._thread is not None:
            return
        products = distinct_products(places, inputs)
        self._thread = threading.Thread(target=self._work, args=(products,), name="mrv2 products", daemon=True)
        self._thread.start()

    def _work(self, products: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
                call_products(products, self.sizes)
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:  # out of memory, at worst: who records them has more, or will say so
            logger.info("matrix products are called when they are recorded: %s", str(error).splitlines()[0])


def distinct_products(places: Sequence[Place], inputs: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """One weight and bias of each layout."""
    found: dict[Any, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for weight_place, bias_place in places:
        weight, bias = inputs[weight_place], None if bias_place is None else inputs[bias_place]
        found.setdefault((weight.shape, weight.dtype, bias is None), (weight, bias))
    return list(found.values())


@torch.no_grad()
def call_products(products: Sequence[tuple[torch.Tensor, torch.Tensor | None]], sizes: Sequence[int]) -> int:
    """Multiply anything by each weight, `sizes` rows at a time, where the library would; returns how often."""
    from attention.kernels.linear import uses_library  # needs Triton

    calls = 0
    for weight, bias in products:
        x = weight.new_empty(max(sizes), weight.shape[1])
        for rows in sizes:
            if uses_library(rows, weight, bias):
                F.linear(x[:rows], weight, bias)
                calls += 1
    return calls
