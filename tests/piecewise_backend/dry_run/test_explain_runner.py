"""The dry run of models made of attention layers: no inputs are needed, the runner makes its own batches."""

import torch
from torch import nn

from piecewise_backend import ReasonCode, explain
from tests.tiny import HIDDEN, TinyDecoder


class Gated(TinyDecoder):
    """Two layers read the same tensor: a runner would make one matrix product of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        return self.gate(hidden) * self.up(hidden)


class Reads(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(input_ids, positions)
        return hidden / hidden.amax().item()  # reads


class Prints(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        print(end="")  # prints
        return super().forward(input_ids, positions)


class Fixed(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, positions) + torch.ones(8, 1)  # fixed


def line_of(mark: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        (number,) = (n for n, text in enumerate(file, start=1) if text.rstrip().endswith(f"# {mark}"))
    return f"{__file__}:{number}"


def test_a_decoder_captures_in_both_kinds_of_batches_and_is_left_as_it_was() -> None:
    model = Gated()
    weights = [weight.data_ptr() for weight in model.parameters()]
    found = explain(model, sizes=[2, 4])
    assert found.captures_fully
    assert found.kind == "runner"
    assert {size.descriptor for size in found.graphs[0].sizes} >= {
        "FULL decode x1, 4 tokens",
        "PIECEWISE mixed, 2 tokens",
    }
    assert found.memory.caches > 0
    assert 0 < found.memory.graph_pool < found.memory.graph_pool_at_most
    assert [weight.data_ptr() for weight in model.parameters()] == weights
    assert all(weight.requires_grad for weight in model.parameters())
    assert not model.layers[0].attention.layer_name


def test_a_value_read_on_the_host_is_named_with_its_line() -> None:
    found = explain(Reads(), sizes=[4])
    (finding,) = found.findings
    assert (finding.code, finding.op) == (ReasonCode.PIECE_NOT_CAPTURABLE, "aten._local_scalar_dense.default")
    assert finding.place == line_of("reads")
    assert found.verdict.startswith("Reads captures in part")


def test_a_line_that_dynamo_cannot_trace_is_named() -> None:
    found = explain(Prints(), sizes=[4])
    (finding,) = found.findings
    assert (finding.code, finding.op, finding.place) == (ReasonCode.GRAPH_BREAK, "print", line_of("prints"))
    assert found.verdict.startswith("Prints does not capture")


def test_a_line_that_works_at_one_size_only_is_named() -> None:
    (finding,) = explain(Fixed(), sizes=[4]).findings
    assert (finding.code, finding.op, finding.place) == (ReasonCode.SIZE_FIXED, "add", line_of("fixed"))
