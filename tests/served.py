"""Synthetic serving runs: one server, requests one after another, service times given."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from results.records import LostRequest, RequestRecord, Run, RunInfo, SampleRecord, ServeInfo
from results.records import run_key as key_of

LAYERS, TOKENS = 4, 10
KINDS = {"nonshared": "none", "fullshared": "all"} | dict.fromkeys(
    ("droidspeak", "cacheblend", "relaycaching"), "budget"
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def serve_info(method: str = "kvcmas", **changes: Any) -> ServeInfo:
    kind = changes.get("rho_kind", KINDS.get(method, "controlled"))
    values: dict[str, Any] = {
        "layout": "T",
        "shared_tokens": 2048,
        "output_tokens": 128,
        "agents": 4,
        "scale": 1.0,
        "arrival": "even",
        "qps": 8.0,
        "time_scale": 0.5,
        "capacity": 2.0,
        "clock": "virtual",
        "decode": False,
        "rho": {"none": 0.0, "all": 1.0}.get(kind, 0.8),
        "rho_kind": kind,
        "rho_method": {"none": None, "all": 1.0, "budget": 0.9}.get(kind, 0.8),
        "schedule": {},
        "work_bound": 1.5,
        "pool": "kvcmas-10-0123456789abcdef",
        "pool_entries": 3,
        "warm_up_requests": 4,
        "memory_needed_bytes": 10**9,
        "memory_limit_bytes": 10**11,
    }
    return ServeInfo.model_validate(values | changes)


def request(info: RunInfo, workflow: int, turn: int, **changes: Any) -> RequestRecord:
    """One answered request; a quarter of its entries was reused."""
    entries = LAYERS * TOKENS
    edge = {
        "slot": "q",
        "source": "A0",
        "target": f"A{turn}",
        "tokens": 5,
        "action": "correct",
        "reason": "forced",
        "shared_entries": LAYERS * 5,
        "executed_entries": LAYERS * 5 - entries // 4,
        "first": False,
    }
    values: dict[str, Any] = {
        "run_key": info.run_key,
        "sample_id": f"w{workflow}",
        "sample_index": workflow,
        "node": f"A{turn}",
        "turn_index": turn,
        "prompt_sha256": sha(f"{info.bench} {workflow} {turn}"),
        "prompt_tokens": TOKENS,
        "ttft_s": 1.0,
        "e2e_s": 1.0,
        "times_s": {"plan": 0.1},
        "layers": LAYERS,
        "entries": {
            "reused": entries // 4,
            "corrected": 0,
            "executed": entries - entries // 4,
            "prefix_hit": 0,
        },
        "touched_rows": TOKENS,
        "executed_flops": 1000,
        "reference_tokens": 0,
        "edges": (edge,),
        "source_bytes": 10,
        "pool_bytes": 1_500_000,
        "pool_entries": 1,
        "reference_bytes": 0,
        "arrival_s": 0.0,
        "released_s": 0.0,
        "started_s": 0.0,
        "finished_s": 1.0,
    }
    return RequestRecord.model_validate(values | changes)


def served_run(
    method: str,
    service: float,
    *,
    workflows: int = 10,
    seed: int = 0,
    label: str = "",
    settings: dict[str, Any] | None = None,
    lost: tuple[LostRequest, ...] = (),
    info: dict[str, Any] | None = None,
    **serve: Any,
) -> Run:
    """A run whose requests take ``service`` seconds, give or take a fifth."""
    cell = serve_info(method, **serve)
    defaults = {"kvcmas": {"chained": True}, "graphflow": {"first_turn": "corrected"}}
    described: dict[str, Any] = {
        "created": "2026-11-29T12:00:00Z",
        "kind": "serve",
        "bench": f"T {cell.shared_tokens}+{cell.output_tokens}",
        "data": "procedural",
        "data_sha256": sha(f"{cell.shared_tokens} {cell.output_tokens}"),
        "method": method,
        "label": label,
        "settings": defaults.get(method, {}) | (settings or {}),
        "model": "tiny-llama",
        "model_revision": "r1",
        "dtype": "float32",
        "engine": "transformers",
        "attention": "sdpa",
        "device": "cpu",
        "hardware": "Some CPU",
        "seed": seed,
        "sample_order_sha256": sha("order"),
        "n": workflows,
        "max_new_tokens": 1,
        "workflow": "fully_connected",
        "profile": "smoke",
        "environment": {"git_commit": "abc1234"},
        "command": "repro serve",
        "serve": cell.model_dump(),
    } | (info or {})
    described["run_key"] = key_of({key: str(value) for key, value in described.items()})
    made = RunInfo.model_validate(described)
    rows = [] if cell.out_of_memory else _rows(made, service, workflows, cell.qps_here)
    samples = tuple(_sample(made, workflow) for workflow in range(workflows if rows else 0))
    gone = {(one.sample_id, one.turn_index) for one in lost}
    kept = tuple(row for row in rows if (row.sample_id, row.turn_index) not in gone)
    return Run(made, (), samples, requests=kept, lost=lost)


def _rows(info: RunInfo, service: float, workflows: int, rate: float) -> list[RequestRecord]:
    rng = random.Random(info.seed)
    free, rows = 0.0, []
    for number in range(4 * workflows):
        arrival = number / rate if rate else free
        start = max(free, arrival)
        free = start + service * rng.uniform(0.8, 1.2)
        times = {"arrival_s": arrival, "released_s": arrival, "started_s": start}
        spent = {"ttft_s": free - arrival, "e2e_s": free - arrival, "finished_s": free}
        rows.append(request(info, number // 4, number % 4, **times, **spent))
    return rows


def _sample(info: RunInfo, workflow: int) -> SampleRecord:
    return SampleRecord(
        run_key=info.run_key,
        sample_id=f"w{workflow}",
        sample_index=workflow,
        correct=None,
        extracted=None,
        expected="",
        failure=None,
        outputs={},
        e2e_s=1.0,
        ttft_mean_s=None,
    )
