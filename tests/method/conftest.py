"""Fixtures of KVCMAS's tests."""

from __future__ import annotations

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from tests.replay import Truth, dense


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen2"])
def model(request: pytest.FixtureRequest) -> TransformersAdapter:
    """An adapter of each of the two tiny models, fp32."""
    return TransformersAdapter(request.getfixturevalue(request.param)[0])


@pytest.fixture(scope="session")
def truths(model: TransformersAdapter) -> list[Truth]:
    """Dense results of requests of different length; tests serve the last one."""
    return [dense(model, 50 + n, 24 - 2 * n) for n in range(4)]
