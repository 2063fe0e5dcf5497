"""How much memory a run needs at once, told from the storages its operators make."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside, as they come and go. What was there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), fresh=False)
        results = func(*args, **(kwargs or {}))
        self._see(results, fresh=True)
        return results

    def _see(self, values: Any, *, fresh: bool) -> None:
        """Storages met first among arguments were made outside."""
        for leaf in tree_leaves(values):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            size = storage.nbytes() if fresh else 0
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size
