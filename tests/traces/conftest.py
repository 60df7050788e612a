from __future__ import annotations

import pytest

from traces.generator import GeneratorSettings, generate
from traces.schema import TraceWorkflow


@pytest.fixture(scope="session")
def workflows() -> tuple[TraceWorkflow, ...]:
    """Layout T at 1/64, 20 workflows of 4 turns: 180 transitions, 60 of them of the query."""
    return generate(GeneratorSettings(vocab=1000, scale=64, workflows=20))
