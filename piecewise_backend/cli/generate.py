"""`mrv2 generate`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from piecewise_backend.cli.values import dtype_named, sizes
from piecewise_backend.config import MODES, parse_options


def add_to(commands: Any) -> None:
    """Add the subcommand to argparse's subparsers."""
    generate = commands.add_parser("generate", help="write text with a model, then print the report")
    generate.add_argument("--model", required=True, help="a local folder, a .gguf file, or smollm2")
    generate.add_argument("--prompt", required=True, action="append", help="may be given several times")
    generate.add_argument("--max-tokens", type=int, default=16, help="new tokens per prompt (default %(default)s)")
    generate.add_argument("--mode", default="FULL_AND_PIECEWISE", help=f"{', '.join(MODES)} (default %(default)s)")
    generate.add_argument("--recorder", default=None, help="auto, cuda, emulated or none (default: auto)")
    generate.add_argument("--compiler", default="inductor", help="inductor, aot_eager or eager (default %(default)s)")
    generate.add_argument("--device", default=None, help="cpu or cuda (default: cuda where there is one)")
    generate.add_argument("--dtype", default=None, help="float32, float16 or bfloat16 (default: the model's own)")
    generate.add_argument("--attention-backend", default=None, help="force one (default: the best that works)")
    generate.add_argument("--capture-sizes", type=sizes, default=None, help="for example 1,2,4,8")
    generate.add_argument(
        "--max-num-tokens", type=int, default=None, help="tokens in one step (default: 512, 64 on a CPU)"
    )
    generate.add_argument("--max-num-reqs", type=int, default=16, help="requests in one step (default %(default)s)")
    generate.add_argument(
        "--draft-tokens", type=int, default=0, help="guess so many tokens ahead in each step (default: none)"
    )
    generate.add_argument(
        "--draft-layers", type=int, default=0, help="guess with the model's first layers (default: by prompt lookup)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=None)
    generate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write text, then print the report; always 0. ValueError for what cannot be used."""
    import torch
    import transformers

    from piecewise_backend.runner import LLM, SamplingParams

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = dtype_named(arguments.dtype)
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    options = {"compiler": arguments.compiler, "capture_sizes": arguments.capture_sizes}
    if arguments.recorder is not None:
        options["recorder"] = arguments.recorder
    parse_options(options, arguments.mode)  # before anything is loaded
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, tokenizer, speculator = _model_and_speculator(arguments, device, dtype)
    llm = LLM(
        model,
        tokenizer=tokenizer,
        speculator=speculator,
        mode=arguments.mode,
        options=options,
        device=device,
        max_num_tokens=arguments.max_num_tokens or (64 if device.type == "cpu" else 512),
        max_num_reqs=arguments.max_num_reqs,
        attention_backend=arguments.attention_backend,
    )
    _stream(llm, arguments.prompt, params)
    Console(stderr=False).print(llm.report)
    return 0


def _model_and_speculator(arguments: argparse.Namespace, device: Any, dtype: Any) -> tuple[Any, Any, Any]:
    from attention.huggingface import first_layers, load
    from piecewise_backend.runner import DraftModel, PromptLookup

    if arguments.draft_layers and not arguments.draft_tokens:
        raise ValueError("--draft-layers needs --draft-tokens: how many tokens to guess in each step")
    loaded = load(arguments.model, dtype=dtype, device=device)
    if not arguments.draft_tokens:
        return loaded.model, loaded.tokenizer, None
    if not arguments.draft_layers:
        return loaded.model, loaded.tokenizer, PromptLookup(arguments.draft_tokens)
    draft = DraftModel(first_layers(loaded.model, arguments.draft_layers), arguments.draft_tokens)
    return loaded.model, loaded.tokenizer, draft


def _stream(llm: Any, prompts: list[str], params: Any) -> None:
    """One prompt is streamed as it comes; several run in one batch and are printed when all are done."""
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for chunk in llm.stream(prompts[0], params):
            print(chunk.text, end="", flush=True)
        print("\n")
        return
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        text = completion.text if completion.error is None else f"\n  refused: {completion.error}"
        print(f"{prompt}{text}\n")
