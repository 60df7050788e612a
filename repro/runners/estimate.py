"""How long an accuracy run may take: tokens counted, and what this machine does per second.

An upper bound in tokens (every turn to its limit, every row executed) times two rates that a
fraction of a second measures: products of matrices for prefills, and reading the weights once for
every decoded token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcmas.engine.workflow import QUERY
from workloads.base import Sample, Workload
from workloads.chat import ChatFormat

# Requests whose questions are tokenised; their mean stands for all.
_SAMPLES = 20
# Decoding also pays for launching its operations: a share on top of reading the weights.
_OVERHEAD = 1.3


class Tokens(NamedTuple):
    """Tokens of one sample's trajectory, over all turns."""

    prefilled: float
    decoded: float

    def times(self, count: float) -> Tokens:
        """The tokens of ``count`` samples."""
        return Tokens(self.prefilled * count, self.decoded * count)


@dataclass(frozen=True)
class Speed:
    """What the machine does in a second: floating-point operations, and bytes of weights read."""

    flops: float
    bytes: float

    def seconds(self, tokens: Tokens, parameters: float, weight_bytes: float) -> float:
        """Time for ``tokens`` on a model of this size."""
        prefill = 2 * parameters * tokens.prefilled / self.flops
        return prefill + _OVERHEAD * weight_bytes * tokens.decoded / self.bytes


def trajectory_tokens(
    workload: Workload,
    chat: ChatFormat,
    samples: Sequence[Sample],
    max_new_tokens: int,
    final_tokens: int | None,
    picture_rows: int = 0,
) -> Tokens:
    """Tokens of a mean trajectory if every turn runs to its limit; observations are left out.

    ``picture_rows`` of an image or a video are part of the question.
    """
    few = samples[:_SAMPLES]
    nodes = workload.workflow.nodes
    question = round(sum(len(chat.encode_shared(s.question)) for s in few) / max(1, len(few)))
    fills = {QUERY: (0,) * (question + picture_rows)}
    prefilled = decoded = 0
    for node in nodes:
        filled = [slot for slot in workload.workflow.consumes(node) if slot in fills]
        prefilled += len(chat.segments(workload.message(node, filled), fills))
        limit = final_tokens or max_new_tokens if node is nodes[-1] else max_new_tokens
        decoded += limit
        fills[node.out_slot] = (0,) * limit
    return Tokens(prefilled, decoded)


def measure(dtype: torch.dtype, device: str, seconds: float = 0.3) -> Speed:
    """The machine's rates in about twice ``seconds``."""
    rows, width = 256, 2048
    weights = torch.randn(4, width, width, device=device).to(dtype)
    many = torch.randn(rows, width, device=device).to(dtype)
    one = many[:1]
    # Four matrices that take turns do not fit into a cache, as a model's weights do not.
    products = calls_per_second(lambda i: many @ weights[i % 4], device, seconds)
    reads = calls_per_second(lambda i: one @ weights[i % 4], device, seconds)
    return Speed(2 * rows * width * width * products, width * width * weights.itemsize * reads)


def calls_per_second(work: Callable[[int], object], device: str, seconds: float) -> float:
    """Calls of ``work`` per second, measured for ``seconds``; each is given its number."""
    work(0)
    start, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        work(calls)
        calls += 1
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    return calls / elapsed
