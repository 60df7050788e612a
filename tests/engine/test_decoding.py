"""Greedy decoding on the materialised buffer, and the cache that an output leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, ph
from kvcmas.engine.session import Engine, Session, TurnResult
from kvcmas.engine.workflow import QUERY, sequential
from tests.workflows import Ids, agent_prompt, random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def first_turn(
    engine: Engine,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    output: Ids | None = None,
    stepwise: bool = False,
    logits: int | None = None,
) -> tuple[Session, TurnResult]:
    workflow = sequential(2)
    session = engine.session(workflow, "r")
    prompt = agent_prompt(workflow, workflow.nodes[0], {QUERY: random_ids(1, 20)})
    result = session.run(
        workflow.nodes[0],
        prompt,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        output=output,
        stepwise=stepwise,
        logits=logits,
    )
    return session, result


def output_cache(session: Session) -> SegmentCache:
    held = session.held("out0")
    assert held is not None
    return held.cache


def test_the_output_cache_covers_every_token_at_the_length_limit(
    model: TransformersAdapter,
) -> None:
    """The last sampled token is fed once more; all of it equals a dense prefill of the same ids."""
    session, result = first_turn(Engine(model, FullShared()), 7)
    assert (len(result.output), result.finish) == (7, "length")
    joined = Prompt((*result.prompt.segments, ph("out0", result.output)))
    dense = Executor(model).run(joined, Plan.make(joined)).buffer
    expected, got = dense.extract(joined.rows(len(joined.segments) - 1)), output_cache(session)
    assert len(got) == 7
    torch.testing.assert_close(got.k, expected.k, atol=1e-4, rtol=0)
    torch.testing.assert_close(got.v, expected.v, atol=1e-4, rtol=0)


def test_decoding_stops_before_a_stop_token(model: TransformersAdapter) -> None:
    engine = Engine(model, FullShared())
    _, free = first_turn(engine, 8)
    at = max(free.output.index(token) for token in free.output)
    assert at >= 2
    for limit in (8, at):  # with room to spare, and sampled right after the last token allowed
        session, result = first_turn(engine, limit, [free.output[at], 10**6])
        assert result.output == free.output[:at]
        assert result.finish == "stop"
        assert len(output_cache(session)) == at
    session, result = first_turn(engine, at - 1, [free.output[at]])
    assert (result.output, result.finish) == (free.output[: at - 1], "length")


def test_an_empty_output_is_nobodys_source(model: TransformersAdapter) -> None:
    engine = Engine(model, FullShared())
    _, free = first_turn(engine, 1)
    for limit, stop, finish in ((5, free.output, "stop"), (0, (), "length")):
        session, result = first_turn(engine, limit, stop)
        assert (result.output, result.finish) == ((), finish)
        assert session.held("out0") is None
        texts = {QUERY: random_ids(1, 20), "out0": ()}
        last = session.workflow.nodes[1]
        after = session.run(last, agent_prompt(session.workflow, last, texts), max_new_tokens=1)
        assert [d.segment for d in after.decisions] == [1]
        assert after.holders == {1: "A0"}


def test_a_forced_output_leaves_the_caches_that_decoding_leaves(
    model: TransformersAdapter,
) -> None:
    engine = Engine(model, FullShared())
    free, decoded = first_turn(engine, 6)
    forced, replayed = first_turn(engine, 0, output=decoded.output)
    assert (replayed.output, replayed.finish) == (decoded.output, "forced")
    assert decoded.continuation_logits is None
    logits = replayed.continuation_logits
    assert logits is not None
    assert logits.shape == (6, model.spec.vocab)
    assert torch.equal(replayed.first_logits, decoded.first_logits)
    greedy = [int(replayed.first_logits.argmax()), *logits[:-1].argmax(dim=1).tolist()]
    assert tuple(greedy) == decoded.output
    got, expected = output_cache(forced), output_cache(free)
    torch.testing.assert_close(got.k, expected.k, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.v, expected.v, atol=1e-5, rtol=0)
    nothing = first_turn(engine, 5, output=())[1]
    assert (nothing.output, nothing.finish, nothing.continuation_logits) == ((), "forced", None)


def test_a_forced_output_gives_only_the_logits_that_are_wanted(model: TransformersAdapter) -> None:
    output = random_ids(2, 6)
    every, all_logits = first_turn(Engine(model, FullShared()), 0, output=output)
    session, some = first_turn(Engine(model, FullShared()), 0, output=output, logits=2)
    assert all_logits.continuation_logits is not None and some.continuation_logits is not None
    assert some.continuation_logits.shape == (2, model.spec.vocab)
    torch.testing.assert_close(
        some.continuation_logits, all_logits.continuation_logits[:2], atol=1e-5, rtol=0
    )
    assert torch.equal(output_cache(session).k, output_cache(every).k)


@pytest.mark.parametrize(("logits", "fed"), [(None, 6), (2, 2), (0, 0)])
def test_an_output_that_nobody_reads_is_fed_as_far_as_its_logits(
    model: TransformersAdapter, logits: int | None, fed: int
) -> None:
    session, first = first_turn(Engine(model, FullShared()), 3)
    last, texts = session.workflow.nodes[-1], {QUERY: random_ids(1, 20), "out0": first.output}
    result = session.run(
        last,
        agent_prompt(session.workflow, last, texts),
        max_new_tokens=0,
        output=random_ids(2, 6),
        logits=logits,
        keep_buffer=True,
    )
    assert result.buffer is not None and result.buffer.length == len(result.prompt) + fed
    rows = result.continuation_logits
    assert (0 if rows is None else len(rows)) == fed


@torch.inference_mode()
def generated(model: Any, ids: list[int], new: int, stop: list[int]) -> Ids:
    """Transformers' own greedy decoding, without the stop token."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop[0],
    )
    tokens = tuple(out[0, len(ids) :].tolist())
    return tokens[:-1] if tokens[-1] in stop else tokens


def test_forced_ids_fed_one_by_one_leave_the_caches_of_one_pass(
    model: TransformersAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = random_ids(2, 6)
    whole, at_once = first_turn(Engine(model, FullShared()), 0, output=output)
    fed: list[int] = []
    extend = Executor.extend

    def counting(
        self: Executor, buffer: Any, ids: Sequence[int], *, logits: int | None = None
    ) -> torch.Tensor:
        fed.append(len(ids))
        return extend(self, buffer, ids, logits=logits)

    monkeypatch.setattr(Executor, "extend", counting)
    session, stepped = first_turn(Engine(model, FullShared()), 0, output=output, stepwise=True)
    assert fed == [1] * 6 and stepped.output == at_once.output == output
    assert stepped.continuation_logits is None
    a, b = output_cache(session), output_cache(whole)
    assert torch.allclose(a.k, b.k, atol=1e-5) and torch.allclose(a.v, b.v, atol=1e-5)


def test_greedy_decoding_equals_generate(hf: PreTrainedModel, model: TransformersAdapter) -> None:
    _, result = first_turn(Engine(model, NonShared()), 24, [2])
    assert result.output == generated(hf, result.prompt.ids, 24, [2])


def test_greedy_decoding_of_a_real_model_equals_generate(
    smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = smollm2
    stop = [tokenizer.eos_token_id]
    workflow = sequential(1)
    finishes = set()
    for question in ("Name three primary colours.", "What is 2 + 2? Answer with one number."):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = Prompt((ph(QUERY, tokenizer(text)["input_ids"]),))
        session = Engine(TransformersAdapter(model), NonShared()).session(workflow, "r")
        result = session.run(workflow.nodes[0], prompt, max_new_tokens=24, stop_ids=stop)
        assert result.output == generated(model, prompt.ids, 24, stop)
        finishes.add(result.finish)
    assert "stop" in finishes


def test_the_first_token_comes_after_planning_and_prefill(model: TransformersAdapter) -> None:
    """TTFT is plan + prefill; building, decoding and capturing come after it, in that order."""
    ticks = iter([100.0, 101.0, 103.0, 107.0, 115.0, 131.0])
    engine = Engine(model, FullShared(), clock=lambda: next(ticks))
    _, result = first_turn(engine, 3)
    times = result.times
    assert (times.plan, times.prefill, times.build) == (1, 2, 4)
    assert (times.decode, times.capture) == (8, 16)
    assert (times.ttft, times.e2e) == (3, 31)
    assert next(ticks, None) is None
