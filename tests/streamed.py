"""Synthetic single streams: times given, bytes chosen."""

from __future__ import annotations

import random
from typing import Any

from results.records import Run, RunInfo, SampleRecord, StreamRecord
from results.records import run_key as key_of
from results.stream_schema import StreamInfo
from tests.served import KINDS, sha

LAYERS, TOKENS = 4, 10
PAPER = "llama-3.1-8b (random weights)"


def stream_info(method: str = "kvcmas", **changes: Any) -> StreamInfo:
    kind = changes.get("rho_kind", KINDS.get(method, "controlled"))
    values: dict[str, Any] = {
        "layout": "T",
        "shared_tokens": 8192,
        "output_tokens": 128,
        "agents": 3,
        "rounds": 1,
        "scale": 1.0,
        "load": "dummy",
        "positions": 9000,
        "model_positions": 100_000,
        "rho_kind": kind,
        "rho": {"none": None, "all": 1.0, "budget": 0.9}.get(kind, 0.8),
        "schedule": {},
        "work_bound": 1.5,
        "pool_entries": 6,
        "pool_copies": 10,
        "warm_up_requests": 3,
        "rates": {"flops_per_s": 1e9, "bytes_per_s": 1e9},
        "memory_needed_bytes": 10**9,
        "memory_limit_bytes": 10**11,
    }
    return StreamInfo.model_validate(values | changes)


def turn(info: RunInfo, workflow: int, index: int, ttft: float, **changes: Any) -> StreamRecord:
    """One turn; a quarter of its entries was reused, but not in the first one."""
    cell = info.stream
    assert cell is not None
    entries, saved = LAYERS * TOKENS, LAYERS * TOKENS // 4 if index else 0
    edge = {
        "slot": "q",
        "source": "A0" if index else None,
        "target": f"A{index}",
        "tokens": 5,
        "action": "correct" if index else "dense",
        "reason": "forced",
        "shared_entries": LAYERS * 5,
        "executed_entries": LAYERS * 5 - saved,
        "first": not index,
    }
    memory = {"weights": 10**9, "active": 10**8, "sources": 10**8, "references": 0}
    values: dict[str, Any] = {
        "run_key": info.run_key,
        "sample_id": f"w{workflow}",
        "sample_index": workflow,
        "node": f"A{index}",
        "turn_index": index,
        "prompt_sha256": sha(f"{info.bench} {workflow} {index}"),
        "prompt_tokens": TOKENS,
        "ttft_s": ttft,
        "e2e_s": ttft + 1,
        "times_s": {"plan": 0.1, "build": 0.0, "decode": 1.0},
        "layers": LAYERS,
        "entries": {"reused": saved, "corrected": 0, "executed": entries - saved, "prefix_hit": 0},
        "touched_rows": TOKENS,
        "executed_flops": 1000,
        "reference_tokens": 0,
        "edges": (edge,),
        "source_bytes": 10**8,
        "pool_bytes": 0,
        "pool_entries": 1,
        "reference_bytes": 0,
        "output_tokens": 4,
        "row_layers": entries,
        "work": ({"phase": "model", "flops": 1e8 * ttft, "moved_bytes": 5e8 * ttft},),
        "memory": {**memory, "pool_base": 0, "pool_delta": 0, "transient": None},
        "peak": {"resident": 2 * 10**9},
    }
    return StreamRecord.model_validate(values | changes)


def stream_run(
    method: str,
    ttft: float,
    *,
    workflows: int = 6,
    label: str | None = None,
    settings: dict[str, Any] | None = None,
    pool: int = 0,
    flops: float | None = None,
    info: dict[str, Any] | None = None,
    **stream: Any,
) -> Run:
    """A run whose later turns take ``ttft`` seconds, give or take a tenth, its first ones 1."""
    cell = stream_info(method, **stream)
    if label is None:
        label = "" if cell.rho_kind in ("none", "all") else f"rho={cell.rho:g}"
    defaults = {"capacity": 10, "rank_base": 32, "rank_delta": 32} if method == "kvcmas" else {}
    described: dict[str, Any] = {
        "created": "2026-11-30T12:00:00Z",
        "kind": "stream",
        "bench": f"T {cell.shared_tokens}, N={cell.agents}, R={cell.rounds}",
        "data": "procedural",
        "data_sha256": sha(f"{cell.shared_tokens} {cell.agents} {cell.rounds} {cell.scale}"),
        "method": method,
        "label": label,
        "settings": defaults | (settings or {}),
        "model": PAPER,
        "model_revision": None,
        "dtype": "bfloat16",
        "engine": "transformers",
        "attention": "sdpa",
        "device": "cuda",
        "hardware": "Some GPU",
        "seed": 0,
        "sample_order_sha256": sha("order"),
        "n": workflows,
        "max_new_tokens": 4,
        "workflow": "fully_connected",
        "profile": "paper",
        "environment": {"git_commit": "abc1234"},
        "command": "repro stream",
        "stream": cell,
    } | (info or {})
    described.setdefault("run_key", key_of({k: str(v) for k, v in described.items()}))
    made = RunInfo.model_validate(described)
    if cell.out_of_memory:
        return Run(made, (), ())
    rng = random.Random(method)
    rows = []
    for workflow in range(workflows):
        for index in range(cell.agents * cell.rounds):
            seconds = ttft * rng.uniform(0.95, 1.05) if index else 1.0
            memory = turn(made, 0, 0, 1.0).memory.model_copy(update={"pool_delta": pool})
            changes: dict[str, Any] = {"memory": memory.model_dump()}
            if flops is not None:
                changes["work"] = ({"phase": "model", "flops": flops, "moved_bytes": 1.0},)
            rows.append(turn(made, workflow, index, seconds, **changes))
    samples = [
        SampleRecord(
            run_key=made.run_key,
            sample_id=f"w{workflow}",
            sample_index=workflow,
            correct=None,
            extracted=None,
            expected="",
            failure=None,
            outputs={},
            e2e_s=1.0,
            ttft_mean_s=1.0,
        )
        for workflow in range(workflows)
    ]
    return Run(made, (), tuple(samples), streamed=tuple(rows))
