"""Claims about bytes, C08 to C13 and C35, from what `repro memory --claims` calculated."""

from __future__ import annotations

from collections.abc import Sequence

from results.claims import Claim, Measured
from results.records import Run
from results.verdicts import Evaluation, evaluates, judge_value, worst


@evaluates("C09", "C10", "C11", "C12", "C13", "C35")
def calculated(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """The claim's own numbers by formula, from the latest calculation; readings beside them."""
    made = [run for run in runs if run.info.kind == "memory"]
    if not made:
        return None
    run = max(made, key=lambda run: run.info.created)
    rows = [row for row in run.formulas if row.sample_id == claim.id]
    judged = [
        judge_value(claim, row.relation, row.ours, row.paper)
        for row in rows
        if row.judged and row.paper is not None
    ]
    if not judged:
        return None
    measured = tuple(Measured(f"{row.quantity}, {row.unit}", row.ours) for row in rows)
    sample = next(sample for sample in run.samples if sample.sample_id == claim.id)
    assumptions = sample.notes.get("assumptions", ())
    texts = assumptions if isinstance(assumptions, list) else []
    setting = "; ".join(("calculated, nothing was run", *map(str, texts)))
    return Evaluation(worst(judged), measured, (run.info.run_key,), setting)
