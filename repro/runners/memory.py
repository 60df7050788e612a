"""Peak memory of a stretch of work: resident set on CPU, allocator on CUDA."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from results.stream_schema import PeakBytes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak since :meth:`reset`, weights included.

    On CPU it is the resident set's high-water mark where the kernel lets a process reset it, else
    the resident set when asked; on CUDA the allocator's peak. The two are not comparable.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Start a new stretch."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            try:
                _CLEAR.write_text("5")
            except OSError:  # not permitted in some containers: the mark then covers the process
                return

    def all(self) -> PeakBytes:
        """Every number that the system has about the stretch."""
        if self._device.type != "cuda":
            return PeakBytes(resident=self.bytes())
        free, total = torch.cuda.mem_get_info(self._device)
        return PeakBytes(
            allocated=torch.cuda.max_memory_allocated(self._device),
            reserved=torch.cuda.max_memory_reserved(self._device),
            driver=total - free,
        )

    def bytes(self) -> int:
        """Peak in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if _STATUS.exists():
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return psutil.Process().memory_info().rss
