"""Storages that tensor operations make, counted while they live."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of storages made inside; workspace of LAPACK and of matrix products does not show.

    Attributes:
        peak: most bytes alive at once.
        largest: the largest single one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._live = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it makes."""
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        outside = {storage_of(tensor) for tensor in given}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage, size = storage_of(tensor), tensor.untyped_storage().nbytes()
            if storage not in self._tensors:
                if storage in outside:
                    continue  # a view of what was there before
                self._tensors[storage] = 0
                self._live += size
                self.largest = max(self.largest, size)
            self._tensors[storage] += 1
            weakref.finalize(tensor, self._gone, storage, size)
        self.peak = max(self.peak, self._live)
        return result

    def _gone(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self._live -= size


def storage_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from others that live at the same time."""
    return tensor.untyped_storage().data_ptr()
