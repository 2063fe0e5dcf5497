"""Block tables to the flat list of pages that FlashInfer reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 1024
"""Requests, and pages, that a program takes at a time."""


@triton.jit
def page_indices_kernel(
    seq_lens,
    block_table,
    page_indices,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program r: the pages of request r, after those of all requests before it."""
    request = tl.program_id(0)
    # Counted anew by every program, from lengths that lie in the cache: an index from the host would cost a copy.
    start = 0
    for first in range(0, request, CHUNK):
        before = first + tl.arange(0, CHUNK)
        lengths = tl.load(seq_lens + before, mask=before < request, other=0)
        pages = tl.maximum((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE, 1)
        start += tl.sum(tl.where(before < request, pages, 0))
    seq_len = tl.load(seq_lens + request)
    num_pages = tl.maximum((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, 1)
    for first in range(0, num_pages, CHUNK):
        page = first + tl.arange(0, CHUNK)
        inside = page < num_pages
        # The table of an empty request holds anything; block 0 exists.
        block = tl.load(block_table + request * stride_table + page, mask=inside & (seq_len > 0), other=0)
        tl.store(page_indices + start + page, block, mask=inside)


def gather_page_indices(
    seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int, page_indices: torch.Tensor
) -> None:
    """Write each request's blocks one request after another to the front of `page_indices`.

    seq_lens: [num_reqs] int32. block_table: [num_reqs, >= pages of the longest] int32. page_indices: [>= pages of
    all] int32. All on one device; nothing is read on the host. A request has a page for each `block_size` tokens begun;
    one of no tokens has block 0, so that every request has a page (see `fill_page_table`).
    """
    page_indices_kernel[(seq_lens.shape[0],)](
        seq_lens,
        block_table,
        page_indices,
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        CHUNK=_CHUNK,
    )


def fill_page_table(
    seq_lens: torch.Tensor, block_size: int, page_indptr: torch.Tensor, last_page_len: torch.Tensor
) -> None:
    """Where each request's pages lie in the flat list, and how full its last one is, from lengths on the host.

    seq_lens, last_page_len: [num_reqs] int32, host. page_indptr: [num_reqs + 1] int32, host: request r's pages are
    page_indptr[r] : page_indptr[r + 1]. An empty request counts as one token: FlashInfer wants 1 <= last_page_len, its
    decode kernel's result over no key at all is NaN, and the decode plan, which gives such a request a block
    nevertheless, does not make room for it.
    """
    lengths = seq_lens.clamp(min=1)
    before_last = (lengths - 1) // block_size
    page_indptr[0] = 0
    torch.cumsum(before_last + 1, 0, dtype=torch.int32, out=page_indptr[1:])
    torch.sub(lengths, before_last * block_size, out=last_page_len)
