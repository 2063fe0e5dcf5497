"""One data-parallel rank, run as a process of its own: serves uneven loads in step with others and prints what it did.

python rank.py RANK WORLD_SIZE FOLDER
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from attention.forward_context import get_forward_context
from piecewise_backend.breakpoints import register_breakpoint
from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.runner import DataParallel, Engine, PromptLookup, SamplingParams
from tests.tiny import VOCAB, TinyDecoder, make_runner, oracle_greedy, work

seen_across: list[tuple[int, ...] | None] = []


@torch.library.custom_op("mrv2_tests::in_step", mutates_args=())
def in_step(x: torch.Tensor) -> torch.Tensor:
    """Like experts spread over ranks: hangs or fails unless every rank runs the step at the same size."""
    context = get_forward_context()
    seen_across.append(context.num_tokens_across_dp)
    assert context.num_tokens_across_dp == (x.shape[0],) * dist.get_world_size()
    dist.all_reduce(torch.zeros_like(x))
    return x.clone()


@in_step.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Spread(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return in_step(super().forward(input_ids, positions))


def main(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    register_breakpoint(in_step, owns_metadata=True)
    model = Spread()
    speculator = PromptLookup(2) if Path(folder, "speculate").exists() else None
    runner = make_runner(model=model, data_parallel=DataParallel(), speculator=speculator, capture_sizes=[1, 4, 8, 16])
    decisions: list[str] = []
    forward = runner.forward

    def noting(batch: object, descriptor: BatchDescriptor) -> torch.Tensor:
        decisions.append(f"{descriptor.mode.name} {descriptor.num_tokens}")
        return forward(batch, descriptor)

    runner.forward = noting
    loads = [3, 17, 0, 5]
    if loads[rank]:
        runner.execute([work("a", list(range(loads[rank])), 0, [0, 1])])
    else:
        runner.execute_idle()
    uneven = list(decisions)
    engine = Engine(runner, vocab_size=VOCAB)
    prompts, tokens = serve(engine, rank)
    wrong = [n for n, p in prompts.items() if tokens[n] != oracle_greedy(model, p, len(tokens[n]))]
    print(
        json.dumps(
            {
                "uneven": uneven,
                "decisions": decisions,
                "served": len(prompts),
                "wrong": wrong,
                "replays": runner.report.num_replays,
                "captured": sorted(str(d) for d in runner.manager.captured),
            }
        )
    )
    dist.destroy_process_group()


def serve(engine: Engine, rank: int, steps: int = 200) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Requests come more often on higher ranks; on rank 0 only early ones, so that it idles for long."""
    rng, prompts, tokens = random.Random(rank), {}, {}
    for step in range(steps):
        if rng.random() < (0.3 if rank else 0.1) and (rank or step < 40):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 25))]
            prompts[engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 8)), f"r{step}")] = prompt
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    while engine.has_work:
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    assert prompts.keys() == tokens.keys()
    return prompts, tokens


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
