"""A tiny Llama with twelve layers; as a script, compiled in a process of its own, with what it found as JSON."""

import json
import sys

import torch

from piecewise_backend.backend import mrv2

SIZES = (16, 7, 30)


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def compile_and_compare(model, cache_dir):
    """Compiled functions, one per trace."""
    functions = []

    def backend(gm, examples):
        functions.append(mrv2(gm, examples, options={"cache_dir": cache_dir, "recorder": "none"}))
        return functions[-1]

    compiled = torch.compile(model, backend=backend)
    for size in SIZES:
        ids = torch.randint(0, 128, (1, size))
        if size == SIZES[0]:
            torch._dynamo.mark_dynamic(ids, 1)
        with torch.no_grad():
            actual = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(actual, model(ids, use_cache=False).logits)
    return functions


def facts_of(functions):
    from torch._dynamo.utils import counters

    (function,) = functions
    return {
        "pieces": function.report.num_pieces,
        "breakpoints": function.report.num_breakpoints,
        "sources": [p.source for p in function.program.pieces],
        "keys": [p.key for p in function.program.pieces],
        "reasons": [str(code) for code in function.report.reasons.codes()],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


if __name__ == "__main__":
    print(json.dumps(facts_of(compile_and_compare(build(), sys.argv[1]))))
