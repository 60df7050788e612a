"""Run records and what is computed from them: statistics, tables, the claim ledger. No torch."""

from results import (
    accuracy_claims,
    accuracy_table,
    analysis_claims,
    coverage_table,
    fidelity_breakdown,
    fidelity_claims,
    fidelity_table,
    headline,
    kvcmas_tables,
    serving_claims,
    serving_tables,
    stream_studies,
    stream_tables,
    ttft_table,
    workload_tables,
)

__all__ = [
    "accuracy_claims",
    "accuracy_table",
    "analysis_claims",
    "coverage_table",
    "fidelity_breakdown",
    "fidelity_claims",
    "fidelity_table",
    "headline",
    "kvcmas_tables",
    "serving_claims",
    "serving_tables",
    "stream_studies",
    "stream_tables",
    "ttft_table",
    "workload_tables",
]
