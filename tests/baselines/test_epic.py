from __future__ import annotations

import pytest
import torch

from baselines.epic import EPIC
from baselines.fullshared import FullShared
from kvcmas.engine.executor import Executor
from kvcmas.errors import UserError
from tests.baselines.scenes import LAYERS, OUT, Q, executed, make_scene


@pytest.mark.parametrize("tokens", [1, 5, 15])
def test_first_rows_of_each_segment(tokens: int, executor: Executor) -> None:
    scene = make_scene(executor)
    plan, run = scene.serve(EPIC(tokens=tokens))
    assert [(d.action, d.reason) for d in plan.decisions] == [("recompute", "first tokens")] * 2
    counts = {i: min(tokens, len(scene.prompt.segments[i])) for i in (Q, OUT)}
    for i in (Q, OUT):
        rows = scene.prompt.rows(i)
        expected = torch.zeros(LAYERS, len(rows), dtype=torch.bool)
        expected[:, :tokens] = True
        assert torch.equal(executed(run.buffer)[:, rows.start : rows.stop], expected)
    _, plain = scene.serve(FullShared())
    extra = run.accounting.row_layers - plain.accounting.row_layers
    assert extra == LAYERS * sum(counts.values())
    assert run.accounting.touched_rows == sum(counts.values())


@pytest.mark.parametrize("rho", [0.5, 0.8, 0.9])
def test_budget_is_met_on_the_given_lengths(rho: float) -> None:
    lengths = [120, 7, 64, 64, 30]
    tokens = EPIC.for_rho(rho, lengths).tokens
    realised = 1 - sum(min(tokens, s) for s in lengths) / sum(lengths)
    assert abs(realised - rho) <= len(lengths) / sum(lengths) / 2


def test_budget_ends() -> None:
    assert EPIC.for_rho(1, [40, 50]).tokens == 0
    assert EPIC.for_rho(0, [40, 50]).tokens == 50
    with pytest.raises(UserError, match="there are none"):
        EPIC.for_rho(0.8, [])


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "16"])
def test_illegal_tokens(tokens: object) -> None:
    with pytest.raises(UserError, match="tokens="):
        EPIC(tokens=tokens)  # type: ignore[arg-type]
