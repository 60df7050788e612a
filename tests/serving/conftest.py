"""One vLLM engine per model for all tests of the plug-in: starting one takes long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.serving.host import Host, HostOptions
from tests.serving.play import Pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Blocks hold 128 rows on a CPU. Prompts are longer than the token budget, so they are chunked, and
# the cache is so small that six long requests cannot all stay.
BLOCKS, TOKENS = 24, 256


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen2"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same tiny model in vLLM and in Transformers."""
    pytest.importorskip("vllm")
    from repro.models import resolve

    model: PreTrainedModel = request.getfixturevalue(request.param)[0]
    name = {"smollm2": "smollm2-135m"}.get(request.param, request.param.replace("_", "-"))
    adapter = TransformersAdapter(model)
    options = HostOptions(
        max_model_len=1024,
        kv_cache_bytes=BLOCKS * 128 * adapter.spec.kv_bytes_per_token,
        max_num_batched_tokens=TOKENS,
        max_logprobs=adapter.spec.vocab,
        forcing=True,
    )
    host = Host(resolve(name).path, options)
    yield Pair(host, adapter)
    host.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the engine nothing is held."""
    yield
    if "pair" in request.fixturenames:
        host = request.getfixturevalue("pair").host
        host.settle()
        assert not any(host.leftovers().values())
