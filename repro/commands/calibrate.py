"""`repro calibrate` and `repro profile`: budgets and offline phases, each found once and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.commands.console import output_console
from repro.commands.options import Request
from repro.commands.recorded import Setting, label
from repro.runners.calibrate import Calibration
from repro.runners.offline import store
from repro.runners.profile import PROFILED, Rule
from results.gates import THRESHOLDS

# Thresholds of the whole curve: the gate's entropies spread over many decades.
CURVE = (1e-9, 1e-6, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
# So many candidates of a profile are printed; the file has all.
SHOWN = 8


def run_calibrate(
    request: Request, methods: str, target: float, *, rule: Rule | None, curve: bool
) -> None:
    """Calibrate methods for a target rho, print what was found and write every curve."""
    console, notes = output_console(), Console(stderr=True)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        make_method(name)
    setting = Setting(request, notes)
    calibrator = setting.calibrator
    found = [calibrator.calibrate(name, {}, target, rule) for name in names]
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("method", "target rho", "realised rho", "settings other than defaults"):
        table.add_column(heading, overflow="fold")
    for result in found:
        rho = "closed form" if result.rho is None else f"{result.rho:.3f}"
        table.add_row(result.method, f"{target:.2f}", rho, label(result.method, result.settings))
    console.print(table)
    whole = {}
    for name in names:
        if curve and name in THRESHOLDS:
            points = calibrator.curve(name, {}, CURVE)
            whole[name] = [[p.threshold, p.rho] for p in points]
            console.print(f"{name}: realised rho by {THRESHOLDS[name]} (Table 6)", style="bold")
            console.print(_curve(whole[name]))
    path = request.out / f"calibration-{target:g}.json"
    store(path, {**_content(found), "whole_curves": whole})
    notes.print(f"what was found is in {path}")


def run_profile(request: Request, method: str, target: float, rule: Rule | None) -> None:
    """Run a method's offline phase, print the best candidates and what was chosen."""
    console, notes = output_console(), Console(stderr=True)
    if method not in PROFILED:
        make_method(method)
        raise UserError(f"{method} has no offline phase; {', '.join(PROFILED)} have")
    found = Setting(request, notes).calibrator.profiler.profile(method, {}, target, rule)
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("candidate")
    table.add_column(found.measure, justify="right")
    # Of candidates the least error is best; of layers and relations the greatest spread matters.
    ranked = sorted(found.scores.items(), key=lambda s: s[1] if found.rule == "search" else -s[1])
    for name, score in ranked[:SHOWN]:
        table.add_row(name, f"{score:.4g}")
    if len(ranked) > SHOWN:
        table.caption = f"{SHOWN} of {len(ranked)}"
    console.print(table)
    console.print(f"{method}, rho {found.rho:g}: {label(method, found.settings) or 'no layers'}")
    path = request.out / f"profile-{method}-{found.rule}-{target:g}.json"
    store(path, asdict(found))
    notes.print(f"the whole profile is in {path}")


def _content(found: Sequence[Calibration]) -> dict[str, object]:
    return {
        "settings": {r.method: r.settings for r in found},
        "curves": {r.method: [[p.threshold, p.rho] for p in r.curve] for r in found if r.curve},
        "profiles": {r.method: asdict(r.profile) for r in found if r.profile is not None},
    }


def _curve(points: Sequence[Sequence[float]]) -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("threshold", "realised rho"):
        table.add_column(heading, justify="right")
    for threshold, rho in points:
        table.add_row(f"{threshold:g}", f"{rho:.3f}")
    return table
