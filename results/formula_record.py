"""The row of a number that was calculated, beside what the paper says about it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from results.schema import RunKey


class FormulaRecord(BaseModel):
    """One quantity of one claim; the sample is the claim, its notes are what was assumed.

    Such rows are in runs of kind "memory", which `repro memory --claims --out` leaves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Literal["formula"] = "formula"
    run_key: RunKey
    sample_id: str
    """Id of the claim."""
    sample_index: NonNegativeInt
    quantity: str
    relation: str
    """As in the ledger; "reading" counts something else than the row before it, "" is ours only."""
    paper: float | None
    """None where the paper says nothing about this quantity."""
    ours: float
    unit: str

    @property
    def judged(self) -> bool:
        """Whether the paper states this quantity, so that ours can be judged."""
        return self.paper is not None and self.relation not in ("", "reading")
