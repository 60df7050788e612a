"""Replaying dense results under another method: the same prompts, the same outputs."""

from __future__ import annotations

from collections.abc import Mapping

from baselines.nonshared import NonShared
from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import fully_connected
from tests.workflows import play, random_ids

WORKFLOW = fully_connected(4)
Truth = dict[str, TurnResult]  # by node name


def dense(model: ModelAdapter, seed: int, query: int = 20) -> Truth:
    """NonShared on a random query of this length, decoded greedily."""
    engine = Engine(model, NonShared())
    return play(engine, WORKFLOW, f"dense{seed}", random_ids(seed, query))


def replayed(
    engine: Engine,
    truth: Truth,
    request: str,
    force: bool | Mapping[tuple[str, int], bool] | None = None,
    nodes: int = 4,
) -> Truth:
    """The first ``nodes`` turns of ``truth`` under the engine's method.

    Decisions may be forced for every PH or by node name and segment.
    """
    session, results = engine.session(WORKFLOW, request), {}
    for node in WORKFLOW.nodes[:nodes]:
        prompt = truth[node.name].prompt
        if isinstance(force, Mapping):
            forced = {i: force[node.name, i] for i in prompt.shared() if (node.name, i) in force}
        else:
            forced = {} if force is None else dict.fromkeys(prompt.shared(), force)
        results[node.name] = session.run(
            node, prompt, max_new_tokens=0, output=truth[node.name].output, force=forced
        )
    return results


def reasons(results: Truth) -> set[str]:
    """Of all decisions."""
    return {d.reason for result in results.values() for d in result.decisions}


def error(results: Truth, truth: Truth) -> float:
    """Largest difference of the last agent's first logits."""
    return float((results["A3"].first_logits - truth["A3"].first_logits).abs().max())
