"""What `repro memory --claims` calculated, as a run of kind ``memory``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvcmas.engine.segments import ids_sha256
from repro import env
from repro.runners.memory_claims import Finding
from results.records import FormulaRecord, RunInfo, RunWriter, SampleRecord, run_key


def write_findings(findings: Sequence[Finding], out: Path) -> Path:
    """Leave a run, one sample per claim; returns its directory. The same numbers are written once.

    Raises:
        RecordError: it cannot be written.
    """
    rows = [[row.claim, row.quantity, row.ours] for found in findings for row in found.rows]
    key = run_key({"kind": "memory", "rows": rows})
    directory = out / "memory" / f"claims-{key}"
    writer = RunWriter(directory, _info(key, len(findings)))
    for index, finding in list(enumerate(findings))[writer.completed() :]:
        claim = finding.rows[0].claim
        formulas = [
            FormulaRecord(
                run_key=key,
                sample_id=claim,
                sample_index=index,
                quantity=row.quantity,
                relation=row.relation,
                paper=row.paper,
                ours=row.ours,
                unit=row.unit,
            )
            for row in finding.rows
        ]
        writer.append_sample(formulas, _end_of_claim(key, index, claim, finding))
    return directory


def _end_of_claim(key: str, index: int, claim: str, finding: Finding) -> SampleRecord:
    return SampleRecord(
        run_key=key,
        sample_id=claim,
        sample_index=index,
        correct=None,
        extracted=None,
        expected="",
        failure=None,
        outputs={},
        e2e_s=0.0,
        ttft_mean_s=None,
        notes={"assumptions": list(finding.assumptions)},
    )


def _info(key: str, claims: int) -> RunInfo:
    nothing = ids_sha256([])
    return RunInfo(
        run_key=key,
        created=datetime.now(UTC),
        kind="memory",
        bench="claims about bytes",
        data="procedural",
        data_sha256=nothing,
        method="kvcmas",
        settings={},
        model="published configurations",
        model_revision=None,
        dtype="bfloat16",
        engine="none",
        attention="none",
        device="none",
        hardware=env.hardware(),
        seed=0,
        sample_order_sha256=nothing,
        n=claims,
        max_new_tokens=128,
        workflow="fully_connected",
        profile="paper",
        environment=env.environment(),
        command=shlex.join(["repro", *sys.argv[1:]]),
    )
