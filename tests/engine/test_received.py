from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kvcmas.engine import received
from kvcmas.engine.attention import Rows
from kvcmas.engine.contract import Fill, Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.received import Received
from kvcmas.engine.segments import Prompt, pf, ph
from tests.workflows import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = Prompt(
    (pf(random_ids(1, 9)), ph("q", random_ids(2, 16)), pf(random_ids(3, 7)), ph("obs0", (5, 6, 7)))
)
OUTPUT = random_ids(4, 8)
CLOSE = 1e-4


def attention(hf: PreTrainedModel, ids: list[int]) -> Tensor:
    """Transformers' own weights summed over layers and heads, ``[queries, keys]``."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = hf(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        hf.set_attn_implementation(before)
    return torch.cat(layers).sum(dim=(0, 1))


@pytest.mark.parametrize("at_once", [1, len(OUTPUT)])
def test_equals_the_sum_of_attention_weights(
    at_once: int, executor: Executor, hf: PreTrainedModel
) -> None:
    """A prompt PH collects from later prompt rows and decoding, the output from decoding."""
    run = executor.run(PROMPT, Plan.make(PROMPT), new_tokens=len(OUTPUT), received=True)
    for start in range(0, len(OUTPUT), at_once):
        executor.extend(run.buffer, OUTPUT[start : start + at_once])
    expected = attention(hf, [*PROMPT.ids, *OUTPUT]).sum(dim=0)
    for rows in (PROMPT.rows(1), PROMPT.rows(3), range(len(PROMPT), len(PROMPT) + len(OUTPUT))):
        got = run.buffer.extract(rows).received
        torch.testing.assert_close(got, expected[rows.start : rows.stop], atol=CLOSE, rtol=CLOSE)


def test_decode_steps_alone(executor: Executor, hf: PreTrainedModel) -> None:
    """Collecting from the first token on leaves the prompt's own queries out."""
    plan = Plan.make(PROMPT)
    run = executor.run(PROMPT, plan, new_tokens=len(OUTPUT))
    executor.collect_received(run.buffer, PROMPT, plan)
    for token in OUTPUT:
        executor.extend(run.buffer, [token])
    expected = attention(hf, [*PROMPT.ids, *OUTPUT])[len(PROMPT) :].sum(dim=0)
    for rows in (PROMPT.rows(1), range(len(PROMPT), len(PROMPT) + len(OUTPUT))):
        got = run.buffer.extract(rows).received
        torch.testing.assert_close(got, expected[rows.start : rows.stop], atol=CLOSE, rtol=CLOSE)


def test_filled_rows_pass_on_what_their_source_holds(executor: Executor) -> None:
    source = executor.run(PROMPT, Plan.make(PROMPT), received=True).buffer.extract(PROMPT.rows(1))
    later = Prompt((pf(random_ids(5, 4)), PROMPT.segments[1], PROMPT.segments[3], pf((9, 9, 9))))
    plan = Plan.make(later, (Fill(1, source),))
    run = executor.run(later, plan, new_tokens=1, received=True)
    executor.extend(run.buffer, [7])
    passed_on = run.buffer.extract(later.rows(1)).received
    assert source.received is not None and passed_on is not None
    assert torch.equal(passed_on, source.received)
    first_seen = run.buffer.extract(later.rows(2)).received
    assert first_seen is not None and first_seen.min() > 0


def test_captures_nothing_unless_asked(executor: Executor) -> None:
    run = executor.run(PROMPT, Plan.make(PROMPT))
    assert run.buffer.extract(PROMPT.rows(1)).received is None


def test_chunks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 21, 8, generator=generator)
    k = torch.randn(2, 50, 8, generator=generator)
    rows = Rows(torch.arange(10, 31), torch.device("cpu"))
    collecting = torch.arange(50) >= 13
    totals = []
    for scores in (1 << 24, 300, 1):
        monkeypatch.setitem(received.SCORES, "cpu", scores)
        collector = Received(collecting, torch.device("cpu"))
        collector.observe(q, rows, k)
        totals.append(collector.total)
    torch.testing.assert_close(totals[1], totals[0])
    torch.testing.assert_close(totals[2], totals[0])
    assert not totals[0][:13].any() and not totals[0][31:].any() and totals[0][13:31].all()
