"""Fixtures of the engine's tests: each of the two tiny models, as Transformers and as adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.executor import Executor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen2"])
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Transformers' own model, fp32."""
    model, _ = request.getfixturevalue(request.param)
    return model


@pytest.fixture(scope="session")
def model(hf: PreTrainedModel) -> TransformersAdapter:
    """The adapter around it."""
    return TransformersAdapter(hf)


@pytest.fixture(scope="session")
def executor(model: TransformersAdapter) -> Executor:
    """An executor on it."""
    return Executor(model)
