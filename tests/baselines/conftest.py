"""Fixtures of the methods' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.executor import Executor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each of the two tiny models, fp32."""
    loaded, _ = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(scope="session")
def executor(model: PreTrainedModel) -> Executor:
    """An executor on each of the two tiny models."""
    return Executor(TransformersAdapter(model))
