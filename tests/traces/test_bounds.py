from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from baselines.fullshared import FullShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine
from traces.bounds import later_pf_share, pf_share, scheduled_work, work_bound
from traces.generator import GeneratorSettings, generate
from traces.schedule import controlled_schedule, even_schedule
from traces.schema import TraceWorkflow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.mark.parametrize(
    ("shared", "share", "bound"), [(2048, 0.41, 1.55), (8192, 0.16, 2.02), (32768, 0.045, 2.34)]
)
def test_layout_t_has_the_published_shares_and_bounds(
    shared: int, share: float, bound: float
) -> None:
    made = generate(GeneratorSettings(vocab=1000, shared=shared, workflows=1))
    f = later_pf_share(made)
    assert f == pytest.approx(share, abs=0.005)
    assert work_bound(4, 0.8, f) == pytest.approx(bound, abs=0.005)


def test_work_bound() -> None:
    assert work_bound(4, 0.0, 0.1) == work_bound(1, 0.8, 0.1) == work_bound(4, 0.8, 1.0) == 1
    assert work_bound(4, 1.0, 0.0) == 4
    for arguments in ((0, 0.8, 0.1), (4, 1.1, 0.1), (4, 0.8, -0.1), (4, math.nan, 0.1)):
        with pytest.raises(ValueError, match="no work bound"):
            work_bound(*arguments)


def test_schedules_agree_with_the_formula() -> None:
    """Where all hops are equally long, a hop is dense or not, and rho comes out exactly."""
    made = generate(GeneratorSettings(vocab=100, layout="L0", shared=320, workflows=5))
    f = pf_share(made[0].turns[0])
    assert f == pytest.approx(0.2)
    work = scheduled_work(made, controlled_schedule(made, 0.8))
    assert work.bound == pytest.approx(work_bound(4, 0.8, f))


def test_non_chained_methods_have_other_bounds() -> None:
    made = generate(GeneratorSettings(vocab=100, shared=1000, output=100, workflows=1, agents=2))
    everything = controlled_schedule(made, 1.0)
    first, second = (len(turn.prompt) for turn in made[0].turns)
    own = 1024 + 512 + 5
    assert scheduled_work(made, everything).executed == first + own + 16
    corrected = scheduled_work(made, everything, correct_first=True)
    assert (corrected.tokens, corrected.executed) == (first + second, own + own + 16)
    # The query and one output are prefilled once more, however often they are read.
    charged = scheduled_work(made, everything, correct_first=True, references=True)
    assert charged.executed == corrected.executed + 1000 + 100


def test_bounds_without_anything_to_reuse() -> None:
    made = generate(GeneratorSettings(vocab=100, scale=64, workflows=2, agents=1))
    assert math.isnan(later_pf_share(made))
    assert scheduled_work(made, controlled_schedule(made, 1.0)).bound == 1


@pytest.fixture(scope="module")
def adapter(tiny_llama: Loaded) -> TransformersAdapter:
    return TransformersAdapter(tiny_llama[0])


@pytest.mark.parametrize("how", ["controlled", "even"])
def test_the_engine_executes_what_the_schedule_counts(
    adapter: TransformersAdapter, how: str
) -> None:
    made: tuple[TraceWorkflow, ...] = generate(
        GeneratorSettings(vocab=adapter.spec.vocab, scale=64, workflows=3)
    )
    schedule = controlled_schedule(made, 0.5) if how == "controlled" else even_schedule(made, 0.6)
    engine, rows = Engine(adapter, FullShared()), 0.0
    for workflow in made:
        session = engine.session(workflow.workflow("fully_connected"), workflow.request)
        for turn in workflow.turns:
            force = schedule.force(workflow.request, turn.node.name, turn.prompt)
            result = session.run(
                turn.node,
                turn.prompt,
                max_new_tokens=len(turn.output),
                output=turn.output,
                force=force,
            )
            rows += result.accounting.row_layers / result.accounting.layers
            reused = {d.segment for d in result.decisions if d.action == "reuse"}
            assert reused == {i for i in force if force[i] and i not in result.first_seen}
    assert rows == scheduled_work(made, schedule).executed
