"""The gated delta rule over whole sequences, without a state cache; and padded batches that serve them in steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attention.backends.linear_attention import LinearAttentionImpl, LinearAttentionMetadata
from attention.backends.linear_attention import LinearAttentionMetadataBuilder as Builder
from attention.backends.linear_attention.step import Step as StepTensors
from attention.metadata import CommonAttentionMetadata
from attention.specs import LinearAttentionSpec
from tests.attention.oracle import TOLERANCE

UNTOUCHED = 7.0
Compute = Callable[[LinearAttentionImpl, "Batch", LinearAttentionMetadata], None]


def with_forward(impl: LinearAttentionImpl, batch: Batch, metadata: LinearAttentionMetadata) -> None:
    impl.forward(*batch.inputs, batch.recurrent_state, metadata, batch.out)


def with_kernels(impl: LinearAttentionImpl, batch: Batch, metadata: LinearAttentionMetadata) -> None:
    """What `forward` runs on a GPU; on the CPU, in Triton's interpreter."""
    inputs = dict(zip(("query", "key", "value", "log_decay", "beta"), batch.inputs, strict=True))
    facts = {name: getattr(metadata, name) for name in ("query_start_loc", "seq_lens", "state_slots")}
    step = StepTensors(**inputs, **facts, recurrent_state=batch.recurrent_state, out=batch.out, scale=impl.spec.scale)
    impl._run_kernels(step, metadata)


def make_spec(
    heads: tuple[int, int] = (2, 2),
    sizes: tuple[int, int] = (16, 16),
    *,
    dtype: torch.dtype = torch.float32,
    num_draft_tokens: int = 0,
) -> LinearAttentionSpec:
    """heads: of keys, of values. sizes: of a key head, of a value head."""
    return LinearAttentionSpec(
        num_k_heads=heads[0],
        num_v_heads=heads[1],
        head_k_size=sizes[0],
        head_v_size=sizes[1],
        scale=sizes[0] ** -0.5,
        block_size=16,
        dtype=dtype,
        num_draft_tokens=num_draft_tokens,
    )


def dense_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence from its first token, in fp64, by equation 10 of https://arxiv.org/abs/2412.06464 as it stands
    there: S_t = S_{t-1} (a_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T, with S [Dv, Dk].

    Returns the outputs [n, Hv, Dv] and the transposed states after each token [n, Hv, Dk, Dv].
    """
    group = value.shape[1] // key.shape[1]
    query, key = (x.double().repeat_interleave(group, 1)[:, :, :, None] for x in (query, key))
    value, decay, beta = value.double(), log_decay.double().exp()[:, :, None, None], beta.double()[:, :, None, None]
    eye = torch.eye(key.shape[2], dtype=torch.float64, device=key.device)
    state = torch.zeros(*value.shape[1:], key.shape[2], dtype=torch.float64, device=key.device)
    outputs, states = [], []
    for q, k, v, a, b in zip(query, key, value[:, :, :, None], decay, beta, strict=True):
        state = state @ (a * (eye - b * (k @ k.mT))) + b * (v @ k.mT)
        outputs.append(scale * (state @ q)[:, :, 0])
        states.append(state.mT)
    return torch.stack(outputs), torch.stack(states)


class RandomSequence:
    """A random sequence of `length` tokens, keys of length 1, and what the oracle makes of it."""

    def __init__(
        self,
        spec: LinearAttentionSpec,
        length: int,
        *,
        seed: int = 0,
        log_decay: tuple[float, ...] = (),
        same_keys: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """log_decay: values that the tokens take at random; by default, a spread from almost none to strong."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(length, *shape, generator=generator)

        key = torch.nn.functional.normalize(randn(spec.num_k_heads, spec.head_k_size), dim=-1)
        if same_keys:
            key = key[:1].expand_as(key)
        decay = -torch.nn.functional.softplus(3 * randn(spec.num_v_heads) - 4)
        if log_decay:
            picks = torch.randint(len(log_decay), decay.shape, generator=generator)
            decay = torch.tensor(log_decay)[picks]
        # Queries long enough that outputs are of order 1.
        query = 4 * randn(spec.num_k_heads, spec.head_k_size)
        value, beta = randn(spec.num_v_heads, spec.head_v_size), randn(spec.num_v_heads).sigmoid()
        # As in models: the decay in fp32 whatever the dtype.
        self.inputs = (*(x.to(spec.dtype) for x in (query, key, value)), decay, beta.to(spec.dtype))
        self.length = length
        on_device = (x.to(device) for x in self.inputs)
        self.out, self.states = dense_gated_delta_rule(*on_device, scale=spec.scale)


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens [start, start + length) of a sequence, for the states in `slot`."""

    sequence: RandomSequence
    start: int
    length: int
    slot: int


class Batch:
    """Buffers of one padded size; `fill` loads them in place with one batch after another.

    What must not be read is NaN: padded tokens, tokens of inert requests, and states that nobody wrote. `out` is NaN
    where it must be written and `UNTOUCHED` where it must not. Inputs are slices of one fused projection.
    """

    def __init__(
        self,
        spec: LinearAttentionSpec,
        *,
        num_tokens: int,
        num_reqs: int,
        num_slots: int = 5,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec, self.num_tokens, self.num_reqs = spec, num_tokens, num_reqs
        widths = [spec.num_k_heads * spec.head_k_size] * 2 + [spec.num_v_heads * spec.head_v_size]
        fused = torch.empty(num_tokens, sum(widths) + 3, dtype=spec.dtype, device=device)
        query, key, value = fused[:, 3:].split(widths, 1)
        decay = torch.empty(spec.num_v_heads, num_tokens, device=device).T
        beta = torch.empty(num_tokens, 2 * spec.num_v_heads, dtype=spec.dtype, device=device)[:, ::2]
        by_head = (spec.num_k_heads, -1), (spec.num_k_heads, -1), (spec.num_v_heads, -1)
        query, key, value = (x.unflatten(1, shape) for x, shape in zip((query, key, value), by_head, strict=True))
        self.inputs = (query, key, value, decay, beta)
        # More rows than tokens, and a state before the first slot: what is written out of bounds shows there.
        out_shape = (num_tokens + 64, spec.num_v_heads, spec.head_v_size)
        self.guarded_out = torch.empty(out_shape, dtype=spec.dtype, device=device)
        self.out = self.guarded_out[:num_tokens]
        shape = spec.caches()["recurrent_state"].shape
        guarded_state = torch.full((1 + num_slots, *shape), float("nan"), device=device)
        guarded_state[0] = UNTOUCHED
        self.no_state, self.recurrent_state = guarded_state[0], guarded_state[1:]
        self.query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.state_slots = torch.full((num_reqs,), -1, dtype=torch.int32, device=device)
        self.steps: Sequence[Step | None] = ()

    def fill(self, steps: Sequence[Step | None]) -> None:
        """None is a padded request, of which there are as many more as there is room for."""
        self.steps = steps = [*steps] + [None] * (self.num_reqs - len(steps))
        for buffer in self.inputs:
            buffer.fill_(float("nan"))
        self.guarded_out.fill_(UNTOUCHED)
        starts, seq_lens, slots = [0], [], []
        for step in steps:
            first = starts[-1]
            starts.append(first + (step.length if step else 0))
            seq_lens.append(step.start + step.length if step else 0)
            slots.append(step.slot if step else -1)
            if step and step.slot >= 0:
                for buffer, whole in zip(self.inputs, step.sequence.inputs, strict=True):
                    buffer[first : starts[-1]] = whole[step.start : step.start + step.length]
                self.out[first : starts[-1]] = float("nan")
        self.query_start_loc.copy_(torch.tensor(starts, dtype=torch.int32))
        self.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        self.state_slots.copy_(torch.tensor(slots, dtype=torch.int32))

    def common(self, *, max_query_len: int | None = None) -> CommonAttentionMetadata:
        """The batch's facts, with true maxima unless another upper bound is given."""
        starts, seq_lens = self.query_start_loc.cpu(), self.seq_lens.cpu()
        nothing = torch.empty(0, dtype=torch.int32)
        return CommonAttentionMetadata(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            num_actual_tokens=int(starts[-1]),
            max_query_len=max_query_len or int(starts.diff().max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens,
            seq_lens_cpu=seq_lens,
            block_table=nothing,
            slot_mapping=nothing,
            token_request=nothing,
            state_slots=self.state_slots,
        )

    def assert_right(self) -> None:
        """`out` and the states are the oracle's for every request with a slot, and padded tokens untouched."""
        tolerance = TOLERANCE[self.spec.dtype]
        starts = self.query_start_loc.tolist()
        for step, first, end in zip(self.steps, starts[:-1], starts[1:], strict=True):
            if step is None or step.slot < 0:
                continue
            stop = step.start + step.length
            expected = step.sequence.out[step.start : stop]
            torch.testing.assert_close(self.out[first:end].double(), expected, atol=tolerance, rtol=tolerance)
            for position in range(step.start, stop) if step.length <= self.spec.num_states else [stop - 1]:
                state = self.recurrent_state[step.slot, position % self.spec.num_states].double()
                torch.testing.assert_close(state, step.sequence.states[position], atol=tolerance, rtol=tolerance)
        assert (self.guarded_out[starts[-1] :] == UNTOUCHED).all(), "rows past the true tokens were written"
        assert (self.no_state == UNTOUCHED).all(), "a state was written for a request without a slot"


class Server:
    """A builder, the computation, and the batch they serve."""

    def __init__(self, batch: Batch, compute: Compute = with_forward) -> None:
        device = batch.out.device
        limits = {"max_num_reqs": batch.num_reqs, "max_num_tokens": batch.num_tokens, "max_model_len": 4096}
        self.batch, self.compute = batch, compute
        self.builder = Builder(batch.spec, **limits, device=device)
        self.impl = LinearAttentionImpl(batch.spec)

    def serve(self, *steps: Step | None, max_query_len: int | None = None, check: bool = True) -> None:
        """One step, which must be right unless `check` is off."""
        self.batch.fill(steps)
        metadata = self.builder.build(self.batch.common(max_query_len=max_query_len), for_capture=False)
        self.compute(self.impl, self.batch, metadata)
        if check:
            self.batch.assert_right()


def serve_in_random_chunks(
    server: Server, sequences: list[RandomSequence], lengths: Sequence[int], *, seed: int
) -> None:
    """All of the sequences, some of them each step in any order, by chunks of these lengths; each has its slot."""
    rng = random.Random(seed)
    slots = rng.sample(range(len(server.batch.recurrent_state)), len(sequences))
    served = [0] * len(sequences)
    while any(done < sequence.length for done, sequence in zip(served, sequences, strict=True)):
        waiting = [index for index, sequence in enumerate(sequences) if served[index] < sequence.length]
        steps: list[Step | None] = []
        for index in rng.sample(waiting, rng.randint(1, len(waiting))):
            length = min(rng.choice(lengths), sequences[index].length - served[index])
            steps.append(Step(sequences[index], served[index], length, slots[index]))
            served[index] += length
        if len(steps) < server.batch.num_reqs and rng.random() < 0.5:
            steps.insert(rng.randint(0, len(steps)), None)
        server.serve(*steps)


def serve_with_rejected_drafts(server: Server, *, prompt: int, slot: int) -> None:
    """A prompt, then steps that verify four tokens each, of which only some turn out right; N must be 4."""
    spec, device = server.batch.spec, server.batch.out.device
    sequence = RandomSequence(spec, prompt + 20, device=device)
    server.serve(Step(sequence, 0, prompt, slot))
    done, tolerance = prompt, TOLERANCE[spec.dtype]
    for seed, accepted in enumerate((1, 4, 2, 3, 1, 1, 4)):
        drafts = RandomSequence(spec, prompt + 20, seed=100 + seed)
        for right, wrong in zip(sequence.inputs, drafts.inputs, strict=True):
            wrong[: done + accepted] = right[: done + accepted]
        server.serve(Step(drafts, done, 4, slot), check=False)
        expected = sequence.out[done : done + accepted]
        torch.testing.assert_close(server.batch.out[:accepted].double(), expected, atol=tolerance, rtol=tolerance)
        done += accepted
    server.serve(Step(sequence, done, 1, slot))
