"""Everything dense equals Transformers' own forward; what cannot be run is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Enter, Event, Fill, Leave, Plan, Select
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.errors import UserError
from repro.models import load, resolve
from tests.workflows import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = (
    "A bakery sells muffins for $3.50 and loaves for $4. On Monday it sold 14 muffins and"
    " half as many loaves.\n\nHow much did it earn?\n```python\nprint(14 * 3.5 + 7 * 4)\n```"
)
TOKENS, TAIL = 60, 12  # of every prompt, and of the part that is appended to a shorter one

Sample = tuple["PreTrainedModel", list[int]]


@pytest.fixture(
    scope="module",
    params=[
        "tiny-llama",
        "tiny-qwen2",
        pytest.param("smollm2-135m", marks=pytest.mark.model),
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.model),
    ],
)
def sample(request: pytest.FixtureRequest) -> Sample:
    """A model in fp32 and the ids of a short text."""
    try:
        resolved = resolve(request.param)
    except UserError as error:
        pytest.skip(f"{request.param} cannot be fetched: {error}")
    model, tokenizer = load(resolved, dtype="float32")
    ids = tokenizer(TEXT)["input_ids"][:TOKENS]
    assert len(ids) == TOKENS
    return model, ids


def prompt_of(ids: list[int]) -> Prompt:
    """The ids in three segments."""
    return Prompt((pf(ids[:20]), ph("q", ids[20:45]), pf(ids[45:])))


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Transformers' logits ``[tokens, vocab]`` and cache ``[layers, kv_heads, tokens, dim]``."""
    out = model(torch.tensor([ids]), use_cache=True)
    layers = out.past_key_values.layers
    return (
        out.logits[0],
        torch.cat([layer.keys for layer in layers]),
        torch.cat([layer.values for layer in layers]),
    )


def test_dense_logits_equal_transformers_at_every_position(sample: Sample) -> None:
    model, ids = sample
    prompt = prompt_of(ids)
    run = Executor(TransformersAdapter(model)).run(prompt, Plan.make(prompt), all_logits=True)
    expected, _, _ = forward(model, ids)
    assert run.logits.shape == expected.shape
    assert float((run.logits - expected).abs().max()) <= 1e-3


def test_dense_last_logits_and_buffer_equal_transformers(sample: Sample) -> None:
    model, ids = sample
    prompt = prompt_of(ids)
    run = Executor(TransformersAdapter(model)).run(prompt, Plan.make(prompt))
    logits, k, v = forward(model, ids)
    assert run.logits.shape == (1, logits.shape[1])
    torch.testing.assert_close(run.logits[0], logits[-1], atol=1e-3, rtol=0)
    torch.testing.assert_close(run.buffer.k, k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run.buffer.v, v, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at_once", [1, 5, TAIL])
def test_extending_equals_a_longer_prefill(sample: Sample, at_once: int) -> None:
    model, ids = sample
    executor, start = Executor(TransformersAdapter(model)), TOKENS - TAIL
    prompt = prompt_of(ids[:start])
    buffer = executor.run(prompt, Plan.make(prompt), new_tokens=TAIL).buffer
    logits = []
    for low in range(start, TOKENS, at_once):
        logits.append(executor.extend(buffer, ids[low : low + at_once]))
    expected, k, v = forward(model, ids)
    torch.testing.assert_close(torch.cat(logits), expected[start:], atol=1e-3, rtol=0)
    torch.testing.assert_close(buffer.k, k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(buffer.v, v, atol=1e-4, rtol=1e-4)
    assert buffer.length == TOKENS
    with pytest.raises(ValueError, match=f"no room for 1 tokens after {TOKENS} of {TOKENS} rows"):
        executor.extend(buffer, [5])


def test_a_long_context_equals_transformers(executor: Executor, hf: PreTrainedModel) -> None:
    """Beyond the original context of llama3's scaling, in many attention calls."""
    ids = list(random_ids(1, 700))
    prompt = Prompt((pf(ids[:300]), ph("q", ids[300:])))
    run = executor.run(prompt, Plan.make(prompt), all_logits=True)
    assert float((run.logits - forward(hf, ids)[0]).abs().max()) <= 1e-3


@pytest.mark.parametrize("lengths", [(1, 0), (0, 1), (0, 5), (3, 0)])
def test_a_single_token_and_empty_segments(
    executor: Executor, hf: PreTrainedModel, lengths: tuple[int, int]
) -> None:
    first, second = lengths
    prompt = Prompt((pf([]), ph("q", random_ids(1, first)), ph("out0", random_ids(2, second))))
    run = executor.run(prompt, Plan.make(prompt), all_logits=True)
    torch.testing.assert_close(run.logits, forward(hf, prompt.ids)[0], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_residual_rows_are_those_before_each_layer(executor: Executor, hf: PreTrainedModel) -> None:
    prompt, more, layers = prompt_of(list(random_ids(1, 60))), random_ids(2, 4), range(4)
    buffer = executor.run(prompt, Plan.make(prompt), new_tokens=4, hidden_layers=layers).buffer
    executor.extend(buffer, more)
    expected = hf(torch.tensor([[*prompt.ids, *more]]), output_hidden_states=True).hidden_states
    cache = buffer.extract(prompt.rows(1))
    for layer in layers:
        torch.testing.assert_close(buffer.hidden[layer], expected[layer][0], atol=1e-4, rtol=0)
        assert torch.equal(cache.residual(layer), buffer.hidden[layer][20:45])
    with pytest.raises(ValueError, match=r"no residual rows of layer 9 .*layers: 0, 1, 2, 3"):
        cache.residual(9)


def test_rows_that_do_not_reach_a_captured_layer_relay_their_sources(executor: Executor) -> None:
    prompt = prompt_of(list(random_ids(1, 60)))
    run = executor.run(prompt, Plan.make(prompt), hidden_layers=(0, 2))
    ph_cache = run.buffer.extract(prompt.rows(1))
    pf_cache = run.buffer.extract(prompt.rows(0))
    entering = torch.arange(30, 45)
    extra = (Enter(0, entering), Leave(2, entering[5:]))
    plan = Plan.make(prompt, (Fill(0, pf_cache), Fill(1, ph_cache)), extra=extra)
    hidden = executor.run(prompt, plan, hidden_layers=(0, 2)).buffer.hidden
    # Nobody delivers the residual rows of a served PF: reading them must show.
    assert bool(hidden[0][:20].isnan().all())
    assert torch.equal(hidden[2][20:30], ph_cache.residual(2)[:10])
    assert torch.equal(hidden[2][35:45], ph_cache.residual(2)[15:])
    torch.testing.assert_close(hidden[2][20:], run.buffer.hidden[2][20:], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="no residual rows of layer 1"):
        executor.run(prompt, plan, hidden_layers=(1,))


@torch.inference_mode()
def test_extraction_copies(executor: Executor) -> None:
    prompt = prompt_of(list(random_ids(1, 60)))
    buffer = executor.run(prompt, Plan.make(prompt), new_tokens=1).buffer
    cache = buffer.extract(prompt.rows(1))
    kept = cache.k.clone(), cache.v.clone()
    assert buffer.extract(prompt.rows(1)) is cache
    buffer.k.zero_()
    buffer.v.zero_()
    assert torch.equal(cache.k, kept[0])
    assert torch.equal(cache.v, kept[1])
    assert len(cache) == 25
    with pytest.raises(ValueError, match="not filled yet"):
        buffer.extract(range(55, 61))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_bf16_is_as_close_to_fp32_as_transformers_is(name: str) -> None:
    prompt = prompt_of(list(random_ids(1, 60)))
    exact = forward(load(resolve(name))[0], prompt.ids)[0]
    model = load(resolve(name), dtype="bfloat16")[0]
    run = Executor(TransformersAdapter(model)).run(prompt, Plan.make(prompt), all_logits=True)
    assert (run.buffer.k.dtype, run.logits.dtype) == (torch.bfloat16, torch.bfloat16)
    theirs = float((forward(model, prompt.ids)[0].float() - exact).abs().mean())
    assert float((run.logits.float() - exact).abs().mean()) <= 1.2 * theirs
    cache = run.buffer.extract(prompt.rows(1))
    other = Prompt((pf(random_ids(3, 5)), ph("q", prompt.segments[1].ids), pf([7, 8])))
    plan = Plan.make(other, (Fill(1, cache),))
    assert bool(Executor(TransformersAdapter(model)).run(other, plan).logits.isfinite().all())


def test_a_context_longer_than_the_model_is_refused(hf: PreTrainedModel) -> None:
    adapter = TransformersAdapter(hf)
    adapter.spec = replace(adapter.spec, max_positions=16)
    executor, prompt = Executor(adapter), Prompt((pf(random_ids(1, 12)),))
    assert executor.run(prompt, Plan.make(prompt), new_tokens=4).buffer.k.shape[2] == 16
    with pytest.raises(UserError, match=r"12 prompt and 5 new tokens .* 16 positions"):
        executor.run(prompt, Plan.make(prompt), new_tokens=5)
    longer = Prompt((pf(random_ids(1, 17)),))
    with pytest.raises(UserError, match="longer than"):
        executor.run(longer, Plan.make(longer))


PROMPT = Prompt((pf(random_ids(1, 4)), ph("q", random_ids(2, 5)), pf(random_ids(3, 3))))
P = torch.arange(4, 9)


def cache_of(tokens: int) -> SegmentCache:
    return SegmentCache(*torch.zeros(2, 4, 2, tokens, 32))


def plan_of(*events: Event, fills: tuple[Fill, ...] = ()) -> Callable[[], Plan]:
    return lambda: Plan.make(PROMPT, fills, extra=events)


FILL = (Fill(1, cache_of(5)),)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: Plan((), (Enter(0, torch.tensor([11])),), ()), "never written"),
        (plan_of(Leave(2, P)), "10 \\(layer, row\\) entries were never written"),
        (plan_of(Select(0, P, lambda c: c.rows[:4])), "4 .* never written"),
        (plan_of(fills=(*FILL, *FILL)), "segment 1 is filled twice"),
        (plan_of(fills=(Fill(1, cache_of(6)),)), "segment 1 has 5 tokens, its cache 6"),
        (plan_of(fills=(Fill(1, cache_of(0)),)), "segment 1 has 5 tokens, its cache 0"),
        (plan_of(Enter(0, torch.tensor([2]))), "layer 0 that is active already"),
        (plan_of(Enter(2, P, torch.zeros(5, 256))), "layer 2 that is active already"),
        (plan_of(Enter(1, P), fills=FILL), "layer 1 without residual rows"),
        (
            plan_of(Enter(1, P, torch.zeros(4, 256)), fills=FILL),
            "5 rows enter with 4 residual rows",
        ),
        (
            plan_of(Leave(2, torch.tensor([11])), fills=FILL),
            "not active in the last layer",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    executor: Executor, plan: Callable[[], Plan], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        executor.run(PROMPT, plan())


def test_all_logits_need_all_rows(executor: Executor) -> None:
    plan = plan_of(fills=FILL)()
    assert executor.run(PROMPT, plan).logits.shape[0] == 1
    with pytest.raises(ValueError, match="not active in the last layer"):
        executor.run(PROMPT, plan, all_logits=True)
