"""Requests that an accuracy run sets apart: recorded once, to fill pools and to find budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kvcmas.errors import UserError
from repro.profiles import CellSpec
from repro.runners.accuracy import BASELINE, Accuracy
from repro.runners.calibrate import Calibration, Calibrator
from repro.runners.deadline import Deadline
from repro.runners.offline import Requests
from repro.runners.record import record_trace
from results.gates import THRESHOLDS
from results.records import run_key
from traces.schema import TraceWorkflow, read_trace

Follow = Callable[[Iterable[TraceWorkflow]], Iterable[TraceWorkflow]]


class Reserved:
    """The reserved samples of a setup as NonShared trajectories, and what is found on them.

    Args:
        follow: handed the trajectories as they are recorded, for a progress bar.
        on_step: told what the calibration is trying.
        deadline: ends the recording; a search that has begun is finished.
    """

    def __init__(
        self,
        accuracy: Accuracy,
        follow: Follow,
        on_step: Callable[[str], None],
        deadline: Deadline,
    ) -> None:
        self._accuracy = accuracy
        self._follow = follow
        self._on_step = on_step
        self._deadline = deadline

    @cached_property
    def workflows(self) -> tuple[TraceWorkflow, ...]:
        """All of them, those that fill pools first; recorded now if they are not there.

        Raises:
            TimeIsUp: the deadline has passed before all were recorded.
        """
        accuracy, setup = self._accuracy, self._accuracy.setup
        samples = setup.reserved
        origin = {**setup.identity, "samples": [sample.id for sample in samples]}
        path = setup.out / f"reserved-{setup.workload.name}-{run_key(origin)}.jsonl"
        if not path.exists():
            runner = accuracy.runner(accuracy.engine(BASELINE, {}))
            record_trace(path, runner, samples, origin, self._follow, self._recorded(len(samples)))
        return read_trace(path).workflows

    def _recorded(self, total: int) -> Callable[[int], None]:
        what = "requests that are set apart are recorded"
        return lambda done: self._deadline.check(done, total, what)

    @property
    def warm(self) -> tuple[TraceWorkflow, ...]:
        """Those that fill pools."""
        count = self._accuracy.setup.warm
        return self.workflows[:count] if count else ()

    def calibrate(self, spec: CellSpec) -> Mapping[str, Any]:
        """Settings as :meth:`find` finds them, and a word about the ratio that they hold.

        Raises:
            UserError: see :meth:`find`.
        """
        found = self.find(spec)
        name = THRESHOLDS.get(spec.method)
        if found.rho is not None and name is not None:
            self._on_step(
                f"{spec.method}: {name}={found.settings[name]:.3g} holds rho {found.rho:.3f}"
                f" of {spec.rho:g}"
            )
        return found.settings

    def find(self, spec: CellSpec) -> Calibration:
        """How the cell's method holds its ``rho`` on the calibration requests.

        Raises:
            UserError: no requests to calibrate on, or a method without a budget for this ``rho``.
        """
        if spec.rho is None:
            raise ValueError(f"cell {spec.method} asks for no reuse ratio")
        if not self._accuracy.setup.calibration:
            raise UserError("rho= needs requests to calibrate on; give --calibration")
        return self._calibrator.calibrate(spec.method, spec.settings, spec.rho, spec.rule)

    def unknown(self, specs: Sequence[CellSpec]) -> list[CellSpec]:
        """Those whose threshold has yet to be searched; none without requests to do it on."""
        if not self._accuracy.setup.calibration:
            return []
        return [
            spec
            for spec in specs
            if spec.rho is not None
            and not self._calibrator.known(spec.method, spec.settings, spec.rho)
        ]

    @cached_property
    def _calibrator(self) -> Calibrator:
        accuracy, setup = self._accuracy, self._accuracy.setup
        requests = Requests(
            adapter=accuracy.adapter,
            topology=setup.workload.workflow.name,
            warm=self.warm,
            held_out=self.workflows[setup.warm :],
            reference_prefix=accuracy.reference_prefix,
            identity=setup.identity,
        )
        return Calibrator(requests, self._on_step)
