"""The gated delta rule in Triton: token by token for short requests, in chunks for long ones.

With a_t = exp(log_decay_t), the recurrence of `LinearAttention` (https://arxiv.org/abs/2412.06464, equation 10) is

    S_t = a_t S_{t-1} + k_t u_t^T,    u_t = beta_t (v_t - a_t S_{t-1}^T k_t),    o_t = scale S_t^T q_t.

Take a chunk of C tokens i = 1 .. C that starts from the state S_0, and let D_ij = a_{j+1} ... a_i for j <= i, the decay
from token j to token i, with D_i0 from the chunk's start. Unrolled,

    S_i = D_i0 S_0 + sum_{j <= i} D_ij k_j u_j^T,

and put into u_i, where the decay a_i takes the terms j < i from D_{i-1,j} to D_ij:

    u_i + sum_{j < i} A_ij u_j = beta_i (v_i - D_i0 S_0^T k_i),    A_ij = beta_i D_ij (k_i . k_j).

So U = (I + A)^-1 diag(beta) (V - diag(D_i0) K S_0): a unit lower triangular system, which does not depend on the state
except through its right-hand side. (The WY or UT transform of https://arxiv.org/abs/2406.06484, section 3.) Then

    O = scale diag(D_i0) Q S_0 + P U,    P_ij = scale D_ij (q_i . k_j) for j <= i,
    S_C = D_C0 S_0 + sum_j D_Cj k_j u_j^T.

`solve_kernel` computes (I + A)^-1 diag(beta), P, D_i0 and D_Cj of all chunks at once; `scan_kernel` goes through the
chunks of each request in order, and carries the state. The inverse is built in blocks that double: where X holds the
inverses of the diagonal blocks of size b, and B the part of A between two such blocks that make one of size 2 b, the
inverses of those are in X - X B X. Unlike a product of powers of A, this meets no numbers larger than the result's own.

Decays are exp of sums of the log decays between two tokens. Sums are formed directly, not as differences of sums from
the chunk's start, which would cancel after a strong decay; they are masked before exp, and none is above 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(rows, dims, real, SIZE: tl.constexpr):
    """Rows at pointers `rows` [R], those that are `real`, as [R, dims] fp32; anything outside is 0, and not read."""
    mask = real[:, None] & (dims < SIZE)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def find_request(request, query_start_loc, seq_lens, state_slots):
    """First token, end of the tokens, the first token's position, and the slot of a request."""
    first = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    position = tl.load(seq_lens + request) - (end - first)
    slot = tl.load(state_slots + request).to(tl.int64)
    return first, end, position, slot


@triton.jit
def short_kernel(
    query, key, value, log_decay, beta, state, out, query_start_loc, seq_lens, state_slots, scale,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_decay_token, stride_decay_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    stride_state_slot, stride_state_entry, stride_state_head, stride_state_row,
    NUM_STATES: tl.constexpr, GROUP: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (request, value head, block of value dimensions): at most NUM_STATES tokens, a state after each."""
    head = tl.program_id(1)
    first, end, position, slot = find_request(tl.program_id(0), query_start_loc, seq_lens, state_slots)
    if (first >= end) | (end - first > NUM_STATES) | (slot < 0):
        return
    dims_k = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = dims_k < SIZE_K, dims_v < SIZE_V
    inside = in_k[:, None] & in_v[None, :]
    states = state + slot * stride_state_slot + head * stride_state_head
    states += dims_k[:, None] * stride_state_row + dims_v[None, :]
    before = (position + NUM_STATES - 1) % NUM_STATES
    s = tl.load(states + before * stride_state_entry, mask=inside & (position > 0), other=0.0)
    # With one state it is overwritten below, and threads may hold copies of one element: all have read it first.
    tl.debug_barrier()
    for index in range(end - first):
        token = (first + index).to(tl.int64)
        key_row = key + token * stride_key_token + head // GROUP * stride_key_head
        query_row = query + token * stride_query_token + head // GROUP * stride_query_head
        value_row = value + token * stride_value_token + head * stride_value_head
        k = tl.load(key_row + dims_k, mask=in_k, other=0.0).to(tl.float32)
        q = tl.load(query_row + dims_k, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(value_row + dims_v, mask=in_v, other=0.0).to(tl.float32)
        decay = tl.exp(tl.load(log_decay + token * stride_decay_token + head * stride_decay_head).to(tl.float32))
        rate = tl.load(beta + token * stride_beta_token + head * stride_beta_head).to(tl.float32)
        s *= decay
        u = rate * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * u[None, :]
        o = scale * tl.sum(s * q[:, None], 0)
        out_row = out + token * stride_out_token + head * stride_out_head
        tl.store(out_row + dims_v, o.to(out.dtype.element_ty), mask=in_v)
        tl.store(states + (position + index) % NUM_STATES * stride_state_entry, s, mask=inside)


@triton.jit
def solve_kernel(
    query, key, log_decay, beta, chunk_plan, solved, scores, decays, scale,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_decay_token, stride_decay_head,
    stride_beta_token, stride_beta_head,
    GROUP: tl.constexpr, SIZE_K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): what the chunk does to any state.

    solved, scores [chunk, head, CHUNK, CHUNK] fp32: (I + A)^-1 diag(beta) and P. decays [chunk, head, 2, CHUNK] fp32:
    from the chunk's start to each token, and from each token to the chunk's end. Rows past a short chunk's tokens are
    tokens with k = q = 0, beta = 0 and no decay, which change nothing. CHUNK is 2 ** LEVELS.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunk_plan + 2 * chunk)
    i = tl.arange(0, CHUNK)
    real = first + i < tl.load(chunk_plan + 2 * chunk + 1)
    token = (first + i).to(tl.int64)
    query += token * stride_query_token + head // GROUP * stride_query_head
    key += token * stride_key_token + head // GROUP * stride_key_head
    kk = tl.zeros([CHUNK, CHUNK], tl.float32)
    qk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, SIZE_K, BLOCK_K):
        dims = start + tl.arange(0, BLOCK_K)
        k = load_tile(key, dims, real, SIZE_K)
        kk = tl.dot(k, tl.trans(k), kk, input_precision=PRECISION)
        qk = tl.dot(load_tile(query, dims, real, SIZE_K), tl.trans(k), qk, input_precision=PRECISION)

    log_decay += token * stride_decay_token + head * stride_decay_head
    g = tl.load(log_decay, mask=real, other=0.0).to(tl.float32)
    rate = tl.load(beta + token * stride_beta_token + head * stride_beta_head, mask=real, other=0.0).to(tl.float32)
    row, column = i[:, None], i[None, :]
    after = tl.where(row > column, g[:, None], 0.0)  # of row i, where it decays token j
    decay = tl.exp(tl.cumsum(after, 0))  # above the diagonal 1, and not used
    place = chunk.to(tl.int64) * tl.num_programs(1) + head
    square = place * CHUNK * CHUNK + row * CHUNK + column
    tl.store(scores + square, tl.where(row >= column, scale * decay * qk, 0.0))
    tl.store(decays + place * 2 * CHUNK + i, tl.exp(tl.cumsum(g, 0)))
    tl.store(decays + place * 2 * CHUNK + CHUNK + i, tl.exp(tl.sum(after, 0)))

    a = tl.where(row > column, rate[:, None] * decay * kk, 0.0)
    x = tl.where(row == column, 1.0, tl.where(row // 2 == column // 2, -a, 0.0))
    for level in range(1, LEVELS):
        between = ((row >> level) != (column >> level)) & ((row >> (level + 1)) == (column >> (level + 1)))
        xb = tl.dot(x, tl.where(between, a, 0.0), input_precision="tf32x3")
        x -= tl.dot(xb, x, input_precision="tf32x3")
    tl.store(solved + square, x * rate[None, :])


@triton.jit
def scan_kernel(
    query, key, value, state, out, solved, scores, decays, request_plan, query_start_loc, seq_lens, state_slots,
    scale,
    stride_query_token, stride_query_head, stride_key_token, stride_key_head, stride_value_token, stride_value_head,
    stride_out_token, stride_out_head, stride_state_slot, stride_state_entry, stride_state_head, stride_state_row,
    NUM_STATES: tl.constexpr, GROUP: tl.constexpr, SIZE_K: tl.constexpr, SIZE_V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (long request, value head, block of value dimensions): its chunks in order, then the last state."""
    head = tl.program_id(1)
    request = tl.load(request_plan + 2 * tl.program_id(0))
    chunk = tl.load(request_plan + 2 * tl.program_id(0) + 1)
    first, end, position, slot = find_request(request, query_start_loc, seq_lens, state_slots)
    if slot < 0:
        return
    dims_k = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = dims_v < SIZE_V
    inside = (dims_k < SIZE_K)[:, None] & in_v[None, :]
    states = state + slot * stride_state_slot + head * stride_state_head
    states += dims_k[:, None] * stride_state_row + dims_v[None, :]
    before = (position + NUM_STATES - 1) % NUM_STATES
    s = tl.load(states + before * stride_state_entry, mask=inside & (position > 0), other=0.0)
    query += head // GROUP * stride_query_head
    key += head // GROUP * stride_key_head
    value += head * stride_value_head
    out += head * stride_out_head
    i = tl.arange(0, CHUNK)
    square = i[:, None] * CHUNK + i[None, :]
    for start in range(first, end, CHUNK):
        token = (start + i).to(tl.int64)
        real = start + i < end
        place = chunk.to(tl.int64) * tl.num_programs(1) + head
        decay_in = tl.load(decays + place * 2 * CHUNK + i)
        decay_out = tl.load(decays + place * 2 * CHUNK + CHUNK + i)
        k = load_tile(key + token * stride_key_token, dims_k, real, SIZE_K)
        v = load_tile(value + token * stride_value_token, dims_v, real, SIZE_V)
        v -= decay_in[:, None] * tl.dot(k, s, input_precision=PRECISION)
        x = tl.load(solved + place * CHUNK * CHUNK + square)
        # Where keys are alike, terms of this product cancel, and TF32 alone would show in bf16 outputs.
        u = tl.dot(x, v, input_precision="tf32x3")

        q = load_tile(query + token * stride_query_token, dims_k, real, SIZE_K)
        p = tl.load(scores + place * CHUNK * CHUNK + square)
        o = scale * decay_in[:, None] * tl.dot(q, s, input_precision=PRECISION)
        o = tl.dot(p, u, o, input_precision=PRECISION)
        out_rows = out + token[:, None] * stride_out_token + dims_v[None, :]
        tl.store(out_rows, o.to(out.dtype.element_ty), mask=real[:, None] & in_v[None, :])

        s *= tl.load(decays + place * 2 * CHUNK + CHUNK - 1)  # from the chunk's start to its end
        s = tl.dot(tl.trans(k * decay_out[:, None]), u, s, input_precision=PRECISION)
        chunk += 1
    last = (position + end - first - 1) % NUM_STATES
    tl.store(states + last * stride_state_entry, s, mask=inside)
