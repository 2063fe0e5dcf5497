"""The script that `write_repro` fills in."""

SCRIPT = '''"""{name} of {subject}, alone.

Eager against compiled against replayed. Exit status 0: they agree; 1: they do not.
Made by piecewise_backend.write_repro with torch {torch}; it needs torch and piecewise_backend.
"""

import sys

{imports}

import piecewise_backend

SEED = 0
OPTIONS = {options}
DYNAMIC = {dynamic}  # (argument, dimension)
CONSTANTS = {{
{constants}}}


{code}


{function}


def make_memory(number, numel, dtype, device):
    """Random memory that arguments lie in: small integers, which are valid as indices."""
    generator = torch.Generator().manual_seed(SEED + number)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(numel, generator=generator) * 0.5).to(device=device, dtype=dtype)
    return torch.randint(0, 2, (numel,), generator=generator).to(device=device, dtype=dtype)


def make_inputs():
{memories}
    arguments = [
{arguments}
    ]
    for argument, dimension in DYNAMIC:
        torch._dynamo.mark_dynamic(arguments[argument], dimension)
    return tuple(arguments)


def main():
    compiled = torch.compile(piece, backend="mrv2", options=OPTIONS, fullgraph=True)
    inputs = make_inputs()
    with torch.no_grad():
        for _ in range(2):  # the second call replays what the first recorded
            compiled(*inputs)
        result = piecewise_backend.verify(compiled, inputs)
    print(result)
    print(piecewise_backend.report(compiled))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
'''
