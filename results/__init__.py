"""Run records and what is computed from them: statistics, tables, the claim ledger. No torch."""

from results import (
    accuracy_table,
    fidelity_breakdown,
    fidelity_table,
    serving_claims,
    serving_tables,
    ttft_table,
)

__all__ = [
    "accuracy_table",
    "fidelity_breakdown",
    "fidelity_table",
    "serving_claims",
    "serving_tables",
    "ttft_table",
]
