"""Cells of emulated methods: those of `repro serve`, under the public harness's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from repro.profiles.serve import ServeMethod
from repro.runners.emulation.costs import (
    NON_CHAINED,
    Constants,
    full_prefills,
    hops,
    load_constants,
    work_bound,
)
from repro.runners.serving.cells import Cell, Study, make_cells
from results.records import run_key
from traces.schedule import even_schedule


def emulation_name(spec: ServeMethod) -> str | None:
    """Which entry of the constants stands for a method; None for variants that have none."""
    if not spec.settings:
        return spec.method
    return NON_CHAINED if (spec.method, spec.settings) == ("kvcmas", {"chained": False}) else None


def emulated_cells(
    study: Study, methods: Sequence[ServeMethod], constants: Constants
) -> list[Cell]:
    """All cells of a study that the harness has a cost for.

    Raises:
        UserError: a method that it has none for, or a ratio that a method cannot realise.
    """
    found = []
    for spec in methods:
        if (name := emulation_name(spec)) is not None:
            found += [_emulated(cell, name, constants) for cell in make_cells(study, [spec])]
    return found


def _emulated(cell: Cell, name: str, constants: Constants) -> Cell:
    study, profile = cell.study, cell.study.profile
    workflows, chosen = study.workload.workflows, cell.budget
    method = constants.method(name, chosen.rho if chosen.kind == "budget" else None)
    made = cell.schedule
    if chosen.kind == "controlled" and chosen.rho is not None:
        made = even_schedule(workflows, chosen.rho)
    cell = replace(
        cell,
        emulated=method,
        settings={"chained": name != NON_CHAINED} if cell.method == "kvcmas" else {},
        label=_label(cell.label, method.page_tokens),
        schedule=made,
        pool="fresh",
    )
    charged = hops(method, cell.requests())
    described = {
        "trace": study.workload.sha256,
        "method": name,
        "charges": method.charges(),
        "rho": cell.rho,
        "time_scale": None if study.capacity is None else study.time_scale,
        "load": [cell.law, cell.qps, cell.seed, profile.clock],
    }
    return replace(
        cell,
        schedule_settings={
            **({} if made is None else made.settings),
            "full_prefills": full_prefills(charged),
            "requests": len(charged),
        },
        bound=work_bound(charged),
        key=run_key({"kind": "emulate", **study.identity, **described}),
    )


def _label(label: str, page_tokens: int | None) -> str:
    """With the size of a page, where that is not the harness's."""
    if page_tokens in (None, load_constants().page_tokens):
        return label
    return f"{label} page_tokens={page_tokens}".strip()
