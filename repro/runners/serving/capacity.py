"""Rates in units of what NonShared can serve: here, and on the paper's model and GPU.

A rate means nothing by itself: 8 requests per second of 2K tokens keep an A100 busy about three
times over, and a CPU hundreds of times. With ``--time-scale auto`` a rate ``q`` stands for the same
multiple of NonShared's capacity here as on the paper's machine:

    multiple  = q / C_paper,  C_paper = A100_BF16 * UTILISATION / F
    rate here = multiple * C_here = q / s,  s = C_paper / C_here

``F`` is the mean of Llama-3.1-8B's prefill FLOPs over the trace's requests at their unscaled
lengths; ``C_here`` is measured. One second of the paper's machine is ``s`` seconds here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, PositiveFloat, ValidationError

from kvcmas.engine.adapter import ModelSpec
from kvcmas.errors import UserError
from repro.runners.offline import store
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Request, ServingEngine
from repro.runners.serving.loop import Answered, serve
from traces.arrival import arrivals
from traces.schema import TraceWorkflow

# Peak of an A100 in bf16 (NVIDIA's data sheet), and the share of it that prefill is taken to reach.
# The share is our assumption: it moves every rate of a sweep by the same factor.
A100_BF16: Final = 312e12
UTILISATION: Final = 0.5

# Llama-3.1-8B's published configuration.
LLAMA_8B: Final = ModelSpec(
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    ffn=14_336,
    vocab=128_256,
    max_positions=131_072,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOPs of a dense prefill with the logits of its last row."""
    attended = tokens * (tokens + 1) // 2
    layers = spec.layers * spec.layer_flops(tokens, tokens, attended)
    return layers + 2 * spec.hidden * spec.vocab


def paper_capacity(prompts: Sequence[int]) -> float:
    """Requests per second that NonShared serves on the paper's machine: ``C_paper``.

    ``prompts`` are the requests' tokens at their unscaled lengths.
    """
    flops = sum(prefill_flops(LLAMA_8B, tokens) for tokens in prompts) / len(prompts)
    return A100_BF16 * UTILISATION / flops


class Capacity(BaseModel):
    """NonShared here, one request after another: ``C_here`` in requests per second."""

    requests_per_s: PositiveFloat
    requests: int


def kept_capacity(path: Path) -> Capacity | None:
    """``C_here`` as it was measured before.

    Raises:
        UserError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return Capacity.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path} is damaged; delete it to measure again") from error


def measured_capacity(
    path: Path, workflow: TraceWorkflow, make_engine: Callable[[Clock], ServingEngine]
) -> Capacity:
    """``C_here``, kept in ``path``, else measured now on one workflow and written there.

    All cells of a study, resumed or not, must be given the same rates.

    Raises:
        UserError: the engine could not serve the workflow, or the file is damaged.
    """
    if (kept := kept_capacity(path)) is not None:
        return kept
    requests = [
        Request(workflow, turn, i, turn.prompt, {}, ()) for i, turn in enumerate(workflow.turns)
    ]
    # The first pass over the first request is discarded: it pays for what is set up once.
    for chosen in (requests[:1], requests):
        clock = Clock("virtual")
        with clock.paused():
            engine = make_engine(clock)
        due = arrivals((workflow,), "even", 0.0)[: len(chosen)]
        results = serve(engine, chosen, due, clock)
        engine.close()
    busy = 0.0
    for result in results:
        if not isinstance(result, Answered):
            raise UserError(f"the model cannot serve a dense request: {result.reason}")
        # From the arrival: nothing queues in a single stream, but an engine may call the earlier
        # chunks of a long prefill its queue.
        busy += result.served.finished - result.arrival
    found = Capacity(requests_per_s=len(results) / busy, requests=len(results))
    store(path, found.model_dump())
    return found
