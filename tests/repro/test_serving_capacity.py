"""What NonShared can serve here, measured on one workflow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from repro.runners.serving.capacity import Capacity, kept_capacity, measured_capacity
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Outcome, Request, Served
from traces import GeneratorSettings, generate

WORKFLOW = generate(GeneratorSettings(vocab=50, scale=256, workflows=1))[0]
CHUNK_S = 0.02


@dataclass
class Chunked:
    """Needs two steps for a request and calls the second one its start, as vLLM's engine does."""

    clock: Clock
    queue: deque[Request] = field(default_factory=deque)
    halfway: bool = False

    def submit(self, request: Request, arrival: float) -> None:
        self.queue.append(request)

    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> Sequence[Outcome]:
        self.halfway = not self.halfway
        if self.halfway:
            time.sleep(CHUNK_S)
            return []
        now = self.clock.now()
        return [Served(self.queue.popleft(), now, now, now, (), {})]

    def close(self) -> None:
        self.queue.clear()


def test_all_chunks_of_a_prefill_count(tmp_path: Path) -> None:
    found = measured_capacity(tmp_path / "capacity.json", WORKFLOW, Chunked)
    assert found.requests == len(WORKFLOW.turns)
    assert 0 < found.requests_per_s <= 1 / CHUNK_S


def test_a_kept_capacity_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(Capacity(requests_per_s=7, requests=4).model_dump_json())
    assert measured_capacity(path, WORKFLOW, Chunked).requests_per_s == 7
    path.write_text("{}")
    with pytest.raises(UserError, match="damaged; delete it"):
        kept_capacity(path)
