"""What is true of a batch whatever the backend: the input of every metadata builder."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonAttentionMetadata:
    """Backend-neutral facts of one (possibly padded) batch.

    Tensors are views of the runner's persistent buffers: their addresses depend on nothing but the padded sizes, so a
    graph recorded over them stays valid. `_cpu` twins hold the same values on the host, for planning without a
    synchronisation; they may be longer-lived copies and must not be kept past the step.

    A padded request has query length 0 and sequence length 0; a padded token has slot -1.
    """

    num_reqs: int
    """Requests, padding included."""
    num_tokens: int
    """Tokens, padding included."""
    num_actual_tokens: int
    """Tokens, padding excluded: the last value of `query_start_loc`."""
    max_query_len: int
    """An upper bound of every request's query length, tokens; the descriptor's own where a graph is recorded or
    replayed, so that both lead to the same kernel."""
    max_seq_len: int
    """An upper bound of every request's sequence length, tokens; the model's maximum while capturing."""
    query_start_loc: torch.Tensor
    """[num_reqs + 1] int32, device: first token of each request in the batch, then the true number of tokens."""
    query_start_loc_cpu: torch.Tensor
    """[num_reqs + 1] int32, host."""
    seq_lens: torch.Tensor
    """[num_reqs] int32, device: tokens in the cache once this step's are written."""
    seq_lens_cpu: torch.Tensor
    """[num_reqs] int32, host."""
    block_table: torch.Tensor
    """[num_reqs, max_num_blocks] int32, device: physical block of each logical block; entries past the sequence
    hold anything."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64, device: block * block_size + offset where each token's key and value go; -1 is inert."""
    token_request: torch.Tensor
    """[num_tokens] int32, device: each token's request; -1 for a padded token."""
    state_slots: torch.Tensor
    """[num_reqs] int32, device: where each request's states lie in per-request caches; -1 is inert: nothing is read
    or written there."""
