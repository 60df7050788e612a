"""Shares of a run in processes of their own.

Matrices of a small model are too small to keep several threads busy; cells are independent.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.queues import Queue
from typing import Any, TypeVar

import torch

from kvcmas.errors import UserError

# How often the parent looks whether a silent process is still there.
SECONDS = 0.2

Tell = Callable[[Any], None]
T = TypeVar("T")


def split(items: Sequence[T], jobs: int, device: str) -> list[tuple[Sequence[T], int]]:
    """Shares of ``items`` for at most ``jobs`` processes, each with the threads that it gets.

    None where one process will do: nothing to share, one thread, or another ``device`` than the
    CPU.
    """
    threads = torch.get_num_threads()
    jobs = min(jobs, len(items), threads) if device == "cpu" else 1
    return [(items[index::jobs], threads // jobs) for index in range(jobs)] if jobs > 1 else []


def failure(codes: Sequence[int | None], jobs: int) -> str:
    """What to say of processes that failed with these exit codes."""
    told = ", ".join(map(str, codes))
    return f"{len(codes)} of {jobs} processes failed (exit code {told}); going on in one"


def run_shares(
    work: Callable[..., None],
    shares: Sequence[tuple[Any, ...]],
    heard: Callable[[int, Any], None],
) -> list[int | None]:
    """Run ``work(*share, tell)`` for each share, at once; the exit codes of those that failed.

    What work leaves lies in files; what it tells is heard here, with the share's index. A process
    that fails takes no other with it: its :class:`UserError` is left to whoever does the same work
    again, any other exception is printed. None outlives this process, however it ends.

    Args:
        work: importable by name, as its arguments are picklable.
    """
    if not shares:
        return []
    context = multiprocessing.get_context("spawn")
    said: Queue[tuple[int, Any]] = context.Queue()
    processes = [
        context.Process(target=_run, args=(work, index, share, said), daemon=True)
        for index, share in enumerate(shares)
    ]
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) or not said.empty():
            with suppress(queue.Empty):
                heard(*said.get(timeout=SECONDS))
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()
    return [process.exitcode for process in processes if process.exitcode != 0]


def _run(
    work: Callable[..., None], index: int, share: tuple[Any, ...], said: Queue[tuple[int, Any]]
) -> None:
    # Ctrl-C reaches all processes of a terminal; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(*share, lambda message: said.put((index, message)))
    except UserError:
        sys.exit(1)


def _end_with_parent() -> None:
    """A killed parent ends nobody; two writers of the same records would be left."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
