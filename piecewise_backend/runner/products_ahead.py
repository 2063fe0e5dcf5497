"""Matrix products of the library, made once before a recording needs them.

The first product of a shape takes the library milliseconds of choosing a kernel, which it then remembers, for all
threads. A start makes hundreds of shapes. So each start notes them on disk, and the next one like it has a thread make
them beside its other work: on a stream of its own, of numbers that mean nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecewise_backend.config import Options
from piecewise_backend.data_files import files_of, read_data, write_data
from piecewise_backend.runner.config import RunnerConfig

if TYPE_CHECKING:
    from attention.kernels.linear import Product  # needs Triton

logger = logging.getLogger(__name__)

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


class ProductsAhead:
    """`begin` early in a start; `noted` surrounds the captures. Does nothing on another device than a GPU."""

    def __init__(self, model: nn.Module, config: RunnerConfig, options: Options, device: torch.device) -> None:
        self.device = device
        self.is_used = device.type == "cuda" and options.cache and options.compiler == "inductor"
        self.parameters = list(model.parameters())
        self.folder = options.cache_dir / "products"
        self.known: frozenset[Product] = frozenset()
        """Noted by the last start like this one."""
        self._thread: threading.Thread | None = None
        shapes = [(tuple(p.shape), p.dtype) for p in self.parameters]
        sizes = (options.mode, options.capture_sizes, options.decode_capture_sizes, options.merge_linears)
        self.key = hashlib.sha256(repr((shapes, config, sizes)).encode()).hexdigest()

    def begin(self) -> None:
        """Have a thread make the products that the last start noted."""
        self.known = self._read() if self.is_used else frozenset()
        numbers = numbers_for(self.known, self.parameters)
        if not numbers:
            return
        stream = torch.cuda.Stream(self.device)
        num_bytes = max(m * n * dtype.itemsize for m, n, _, dtype, _ in numbers)
        try:
            out = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            _log_not_made(error)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._thread = threading.Thread(
            target=_on_stream, args=(stream, numbers, out), name="mrv2 products", daemon=True
        )
        self._thread.start()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Waits for the thread, and keeps what products are made within for the next start."""
        if not self.is_used:
            yield
            return
        from attention.kernels.linear import noting_library_products  # needs Triton

        if self._thread is not None:
            self._thread.join()
        with noting_library_products() as products:
            yield
        if not products <= self.known:
            self._write(products)

    def _read(self) -> frozenset[Product]:
        for path in files_of(self.folder, self.key):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                rows = read_data(path)
                return frozenset((int(m), int(n), int(k), _DTYPES[dtype], bool(bias)) for m, n, k, dtype, bias in rows)
            logger.info("%s is no list of products, and not used", path)
        return frozenset()

    def _write(self, products: Collection[Product]) -> None:
        rows = [(m, n, k, str(dtype).removeprefix("torch."), bias) for m, n, k, dtype, bias in products]
        try:
            write_data(self.folder, self.key, sorted(rows))
        except OSError as error:
            logger.info("products of this start are not kept: %s", error)


def numbers_for(products: Collection[Product], parameters: Sequence[torch.Tensor]) -> dict[Product, torch.Tensor]:
    """By product, largest first: a parameter that has numbers enough, flat, to stand for its operands. Products without
    one are left out."""
    largest: dict[torch.dtype, torch.Tensor] = {}
    for parameter in sorted((p for p in parameters if p.is_contiguous()), key=torch.numel):
        largest[parameter.dtype] = parameter.detach().view(-1)
    return {
        product: largest[product[3]]
        for product in sorted(products, key=lambda p: p[:3], reverse=True)
        if product[3] in largest and _has_operands(product, largest[product[3]].numel())
    }


def _has_operands(product: Product, count: int) -> bool:
    m, n, k, *_ = product
    return min(m, n, k) > 0 and max(m * k, n * k, m * n) <= count


def make_products(numbers: dict[Product, torch.Tensor], out: torch.Tensor) -> None:
    """`out`: memory for the largest result, uint8 [bytes of it]."""
    from attention.kernels.linear import library_product  # needs Triton

    for (m, n, k, dtype, bias), flat in numbers.items():
        x, weight = flat[: m * k].view(m, k), flat[: n * k].view(n, k)
        result = out[: m * n * dtype.itemsize].view(dtype).view(m, n)
        library_product(x, weight, flat[:n] if bias else None, result)


def _on_stream(stream: Any, numbers: dict[Product, torch.Tensor], out: torch.Tensor) -> None:
    try:
        with torch.no_grad(), torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.query()  # any call gives this thread the device's context, which the library asks for
            try:
                make_products(numbers, out)
            finally:
                stream.synchronize()  # `out` goes back to the allocator
    except Exception as error:  # the start makes them itself, and will say what is wrong
        _log_not_made(error)


def _log_not_made(error: Exception) -> None:
    logger.info("products are not made ahead: %s: %s", type(error).__name__, error)
