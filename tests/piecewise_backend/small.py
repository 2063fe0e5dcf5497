"""A small model compiled in a process of its own: `python small.py FOLDER OP...`; what came of it as JSON."""

import json
import sys

import torch

from piecewise_backend.backend import mrv2
from tests.piecewise_backend.operators import pair, triple


def model(x):
    y = triple(x * 2) + 1
    a, b = pair(y - 3)
    return a * b


def run(cache_dir, splitting_ops):
    functions = []

    def backend(gm, examples):
        options = {"cache_dir": cache_dir, "splitting_ops": splitting_ops}
        functions.append(mrv2(gm, examples, options=options))
        return functions[-1]

    x = torch.arange(12.0).view(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (function,) = functions
    return function


if __name__ == "__main__":
    function = run(sys.argv[1], sys.argv[2:])
    codes = [str(code) for code in function.report.reasons.codes()]
    print(json.dumps({"sources": {p.key: p.source for p in function.program.pieces}, "reasons": codes}))
