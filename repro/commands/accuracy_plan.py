"""What `repro accuracy --dry-run` shows: the cells, and about how long they may take here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from kvcmas.registry import make_method
from repro.commands.console import duration
from repro.models.loading import load_tokenizer, quiet_transformers
from repro.profiles import CellSpec
from repro.runners.accuracy import Setup
from repro.runners.calibrate import STEPS
from repro.runners.cells import depends_on_order, variant
from repro.runners.estimate import Speed, Tokens, measure, trajectory_tokens
from repro.runners.vision import picture_rows
from results.gates import THRESHOLDS
from workloads.chat import ChatFormat


def plan_table(
    setup: Setup, specs: Sequence[CellSpec], seeds: Sequence[int], time_limit: float | None = None
) -> Group:
    """One row per cell and, below, what is set apart and the time limit in minutes.

    Times are upper bounds, see the estimate.
    """
    estimate = _Estimate(setup)
    samples = min(setup.n, len(setup.dataset.samples))
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "settings other than defaults", "samples", "orders", "at most"):
        table.add_column(heading, overflow="fold")
    total = estimate.reserved(specs)
    for spec in specs:
        learns = depends_on_order(make_method(spec.method, spec.settings))
        orders = len(seeds) if learns else 1
        seconds = orders * estimate.cell(samples, warm=learns)
        total += seconds
        table.add_row(
            spec.method, variant(spec) or "-", str(samples), str(orders), duration(seconds)
        )
    notes = [
        f"set apart: {setup.warm} requests to fill pools, {setup.calibration} to calibrate on: "
        f"at most {duration(estimate.reserved(specs))}",
        f"in all at most about {duration(total)} here, if every turn runs to its limit and every "
        "row is executed",
    ]
    if time_limit:
        notes.append(
            f"no sample begins after {time_limit:g} min; the same command goes on from there"
        )
    return Group(table, *(Text(note) for note in notes))


class _Estimate:
    """Seconds of a setup's parts on this machine."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        with quiet_transformers():
            chat = ChatFormat.from_tokenizer(load_tokenizer(setup.model.path))
        self._tokens = trajectory_tokens(
            setup.workload,
            chat,
            setup.dataset.samples[: setup.n],
            setup.max_new_tokens,
            setup.final_tokens,
            picture_rows(setup.dataset.samples[: setup.n], setup.model),
        )
        weights = sum(
            path.stat().st_size
            for pattern in ("*.safetensors", "pytorch_model*.bin")
            for path in setup.model.path.glob(pattern)
        )
        stored = setup.model.entry.dtype if setup.model.entry else "float32"
        stored_dtype: torch.dtype = getattr(torch, stored)
        dtype = stored_dtype if setup.dtype == "auto" else getattr(torch, setup.dtype)
        self._parameters = weights / stored_dtype.itemsize
        self._weight_bytes = self._parameters * dtype.itemsize
        self._speed: Speed = measure(dtype, setup.device)

    def cell(self, samples: int, *, warm: bool) -> float:
        """A method on all samples, its pool filled before if it has one."""
        replays = self._setup.warm if warm else 0
        return self._seconds(self._tokens.times(samples)) + self._replayed(replays)

    def reserved(self, specs: Sequence[CellSpec]) -> float:
        """Recording the reserved requests, and replaying them for every calibrated threshold."""
        setup = self._setup
        thresholds = sum(spec.rho is not None and spec.method in THRESHOLDS for spec in specs)
        recorded = self._seconds(self._tokens.times(setup.warm + setup.calibration))
        return recorded + thresholds * self._replayed(setup.warm + STEPS * setup.calibration)

    def _replayed(self, requests: int) -> float:
        """Replays feed the recorded outputs in one pass: no token is decoded by itself."""
        one = self._tokens
        return self._seconds(Tokens(one.prefilled + one.decoded, 0).times(requests))

    def _seconds(self, tokens: Tokens) -> float:
        return self._speed.seconds(tokens, self._parameters, self._weight_bytes)
