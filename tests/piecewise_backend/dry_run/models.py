"""Models that a dry run is to judge: each breaks in one way, on the line marked with its name."""

import torch
from torch import nn


class Fine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("positions", torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class ReadsOnHost(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        largest = y.abs().amax().item()  # item
        return y / largest


class Masks(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        chosen = y[y > 0]  # mask
        return y + chosen.sum()


class FixedLength(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + self.positions  # fixed


class Branches(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] * 2 == 16:  # branch
            x = x + self.positions
        return self.linear(x)


class MixesRows(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        center = y.mean(0)  # mixes
        return y - center


class PrintsInLoop(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.no_grad():
                print(end="")  # prints
                x = self.linear(x)
        return x


class WritesCache(Fine):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:2].add_(1)
        return self.linear(x) + cache[0]


class WritesInput(Fine):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows.add_(1))


class LooksUp(Fine):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.positions[ids])


class Attends(Fine):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(x)[:, None, None]
        return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0, 0]


def line_of(mark: str) -> str:
    """ "file:line" of the line that ends with `# mark`."""
    with open(__file__, encoding="utf-8") as file:
        (number,) = (n for n, text in enumerate(file, start=1) if text.rstrip().endswith(f"# {mark}"))
    return f"{__file__}:{number}"
