"""Which cells an accuracy run has: methods with their settings, budgets and orders of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, setting_names, suggestion
from repro.profiles import CellSpec
from repro.runners.profile import RULES
from results.gates import THRESHOLDS

# Methods that the calibrator can give a budget for a reuse ratio.
BUDGETED = (*THRESHOLDS, *RULES, "cacheblend", "epic", "graphflow")


@dataclass(frozen=True)
class Cell:
    """One method on one bench in one order: what it is, and the key of all that changes its result.

    Attributes:
        settings: all of the method's settings, budgets included.
        target_rho: the reuse ratio they were calibrated for.
        seed: of the order of the samples.
        accept_all: every correction is accepted; no gate is asked.
    """

    method: str
    settings: Mapping[str, Any]
    label: str
    target_rho: float | None
    accept_all: bool
    seed: int
    key: str
    directory: Path


def choose_cells(cells: Sequence[CellSpec], names: Sequence[str] | None) -> list[CellSpec]:
    """The cells of these methods; a method without one gets a cell with its default settings.

    Raises:
        UserError: an unknown method.
    """
    if names is None:
        return list(cells)
    chosen: list[CellSpec] = []
    for name in names:
        find_method(name)
        own = [cell for cell in cells if cell.method == name]
        chosen += own or [CellSpec(method=name)]
    return chosen


def apply_settings(cells: Sequence[CellSpec], overrides: Mapping[str, Any]) -> list[CellSpec]:
    """The cells with ``key=value`` or ``method.key=value`` settings on top.

    A bare key goes to every cell whose method has such a setting. A threshold set by hand is not
    calibrated.

    Raises:
        UserError: a key that no chosen method has, or an illegal value.
    """
    methods = list(dict.fromkeys(cell.method for cell in cells))
    chosen = list(cells)
    for key, value in overrides.items():
        owner, _, setting = key.rpartition(".")
        targets = [owner] if owner else [m for m in methods if key in setting_names(find_method(m))]
        if not targets or any(t not in methods for t in targets):
            known = sorted({f for m in methods for f in setting_names(find_method(m))})
            raise UserError(
                f"no chosen method has a setting {key!r}{suggestion(key, tuple(known))}"
            )
        chosen = [
            _with_setting(cell, setting, value) if cell.method in targets else cell
            for cell in chosen
        ]
    for cell in chosen:
        make_method(cell.method, cell.settings)
        if cell.rho is not None and THRESHOLDS.get(cell.method) in cell.settings:
            raise UserError(
                f"{cell.method}: rho= finds {THRESHOLDS[cell.method]}, give one of them"
            )
    return chosen


def with_defaults(
    cells: Sequence[CellSpec], settings: Mapping[str, Mapping[str, Any]]
) -> list[CellSpec]:
    """The cells with a profile's settings of their methods below their own."""
    return [
        cell.model_copy(update={"settings": {**settings.get(cell.method, {}), **cell.settings}})
        for cell in cells
    ]


def with_rho(cells: Sequence[CellSpec], rho: float) -> list[CellSpec]:
    """The cells, calibrated for ``rho`` where their methods have a budget."""
    return [
        cell.model_copy(update={"rho": rho, "settings": _without_threshold(cell)})
        if cell.method in BUDGETED
        else cell
        for cell in cells
    ]


def depends_on_order(method: Method) -> bool:
    """Whether what a method does for a request depends on the requests before it."""
    learns = type(method).after_first_token is not Method.after_first_token
    return learns or method.pf_policy != "dense"


def variant(cell: CellSpec) -> str:
    """What tells the cell from its method's defaults, for tables."""
    defaults = make_method(cell.method).settings()
    settings = make_method(cell.method, cell.settings).settings()
    parts = [f"{k}={v}" for k, v in settings.items() if v != defaults[k]]
    parts += [f"rho={cell.rho:g}"] if cell.rho is not None else []
    parts += [f"by {cell.rule}"] if cell.rule is not None else []
    return " ".join([*parts, *(["accept all"] if cell.accept_all else [])])


def _without_threshold(cell: CellSpec) -> dict[str, Any]:
    return {k: v for k, v in cell.settings.items() if k != THRESHOLDS.get(cell.method)}


def _with_setting(cell: CellSpec, setting: str, value: Any) -> CellSpec:
    changes: dict[str, Any] = {"settings": {**cell.settings, setting: value}}
    if setting == THRESHOLDS.get(cell.method):
        changes["rho"] = None
    return cell.model_copy(update=changes)
