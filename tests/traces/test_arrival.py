from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from kvcmas.errors import UserError
from traces.arrival import Arrival, Law, arrivals, read_timestamps, stretched
from traces.generator import GeneratorSettings, generate
from traces.schema import TraceWorkflow, TurnKey, turn_keys

Workflows = tuple[TraceWorkflow, ...]


@pytest.fixture(scope="module")
def many() -> Workflows:
    return generate(GeneratorSettings(vocab=9, layout="L0", shared=1, scale=1e3, workflows=500))


def times(made: Sequence[Arrival]) -> list[float]:
    return [a.time for a in made if a.time is not None]


def csv_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("TIMESTAMP,ContextTokens", *lines)))
    return path


def seconds(n: int) -> list[str]:
    """Arrivals of growing distance: 0, 1, 3, 6, ... s."""
    stamps = np.cumsum(range(n))
    return [f"2023-11-16 18:{s // 60:02d}:{s % 60:02d}.5000000,1" for s in stamps]


def test_even_hops_are_at_k_over_qps(workflows: Workflows) -> None:
    made = arrivals(workflows, "even", 8)
    assert [a.turn for a in made] == turn_keys(workflows)
    assert times(made) == [k / 8 for k in range(80)]


@pytest.mark.parametrize("law", ["poisson", "even", "workflow"])
def test_gaps_are_exponential_where_they_should_be(many: Workflows, law: Law) -> None:
    made = times(arrivals(many, law, 2.0, seed=3))
    assert len(made) == (500 if law == "workflow" else 2000)
    rate = 0.5 if law == "workflow" else 2.0
    gaps = np.diff(made)
    # The mean rate is exact, not drawn.
    assert gaps.sum() == pytest.approx((len(made) - 1) / rate, rel=1e-12)
    fit = kstest(gaps * rate, "expon").pvalue
    assert fit < 1e-6 if law == "even" else fit > 0.01


def test_poisson_counts_are_not_even(many: Workflows) -> None:
    """In windows of 5 s at 2/s the number of arrivals varies as a Poisson variable does."""
    counts = np.histogram(times(arrivals(many, "poisson", 2.0, seed=4)), np.arange(0, 1000, 5))[0]
    assert 0.7 < counts.var() / counts.mean() < 1.4


def test_workflow_law_is_causal(workflows: Workflows) -> None:
    made = arrivals(workflows, "workflow", 4.0, seed=1)
    for first, *rest in (made[i : i + 4] for i in range(0, 80, 4)):
        assert first.time is not None
        assert first.after == ()
        assert [a.after for a in rest] == [(a.turn,) for a in (first, *rest[:-1])]
    starts = times(made)
    assert len(starts) == 20
    assert starts[0] == 0
    assert starts[-1] == pytest.approx(19 / (4.0 / 4))


@pytest.mark.parametrize("law", ["even", "poisson", "workflow"])
def test_qps_0_is_a_single_stream(workflows: Workflows, law: Law) -> None:
    made = arrivals(workflows, law, 0)
    assert made[0] == Arrival(TurnKey(workflows[0].request, "A0"), 0.0)
    assert [a.after for a in made[1:]] == [(a.turn,) for a in made[:-1]]
    assert times(made[1:]) == []


@pytest.mark.parametrize("law", ["poisson", "workflow", "azure"])
def test_the_seed_decides(workflows: Workflows, law: Law, tmp_path: Path) -> None:
    recorded = csv_file(tmp_path / "a.csv", *seconds(84)) if law == "azure" else None
    first, again, other = (
        arrivals(workflows, law, 1.0, seed=seed, recorded=recorded) for seed in (0, 0, 5)
    )
    assert first == again
    assert first != other


def test_recorded_gaps_keep_their_order(workflows: Workflows, tmp_path: Path) -> None:
    recorded = csv_file(tmp_path / "a.csv", *seconds(80))
    made = times(arrivals(workflows, "azure", 5.0, recorded=recorded))
    assert np.diff(made) / np.diff(made)[0] == pytest.approx(np.arange(1, 80))
    assert made[0] == 0
    assert made[-1] == pytest.approx(79 / 5.0)


@pytest.mark.parametrize(("name", "rows"), [("conv", 19366), ("code", 8819)])
def test_real_arrivals(many: Workflows, shared: Path, name: str, rows: int) -> None:
    path = shared / "data" / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv"
    stamps = read_timestamps(path)
    assert len(stamps) == rows
    assert 3300 < stamps[-1] < 3600
    made = times(arrivals(many, "azure", 8.0, seed=2, recorded=path))
    assert made[-1] == pytest.approx(1999 / 8)
    # A window of the file, stretched: find it by its first gap, then compare all.
    spans = stamps[1999:] - stamps[:-1999]
    near = np.isclose(np.diff(stamps)[: len(spans)] / spans, made[1] / made[-1], rtol=1e-9)
    windows = [stretched(stamps[i : i + 2000], 8.0) for i in np.flatnonzero(near)]
    assert any(np.allclose(window, made) for window in windows)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["2023-11-16 18:17:03.9799600,1", "soon,1"], ":3: .*soon"),
        (["2023-11-16 18:17:03,1", "", "2023-11-16 18:17:02,1"], ":4: .*before"),
        (["2023-11-16 18:17:03,1", "2023-11-16 18:17:04+00:00,1"], ":3: .*offset"),
        (["2023-11-16 18:17:03,1"] * 80, "at one instant"),
        (["2023-11-16 18:17:03,1"], "1 arrivals, the trace has 80 turns"),
    ],
)
def test_malformed_recordings(
    workflows: Workflows, tmp_path: Path, lines: list[str], message: str
) -> None:
    path = csv_file(tmp_path / "a.csv", *lines)
    with pytest.raises(UserError, match=message):
        arrivals(workflows, "azure", 1.0, recorded=path)


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(UserError, match="cannot read"):
        read_timestamps(path)
    path.write_text("")
    with pytest.raises(UserError, match=r":1: no column TIMESTAMP"):
        read_timestamps(path)
    path.write_text("ContextTokens,TIMESTAMP\n3,2023-11-16\n3\n")
    with pytest.raises(UserError, match=r":3: 1 columns"):
        read_timestamps(path)
    path.write_bytes(b"TIMESTAMP\n2023-11-16\n\xff\xfe\n")
    with pytest.raises(UserError, match=r":3: not a text file"):
        read_timestamps(path)
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP\r\n2023-11-16\r\n\r\n")
    assert read_timestamps(path).tolist() == [0.0]


def test_bad_settings(workflows: Workflows, tmp_path: Path) -> None:
    for qps in (-1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="qps"):
            arrivals(workflows, "even", qps)
    with pytest.raises(UserError, match="known: even, poisson, workflow, azure"):
        arrivals(workflows, "gamma", 1.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs a file"):
        arrivals(workflows, "azure", 1.0)
    with pytest.raises(UserError, match="takes no"):
        arrivals(workflows, "even", 1.0, recorded=tmp_path)
    turn = TurnKey("r", "A0")
    for time, after in ((None, ()), (0.0, (turn,))):
        with pytest.raises(ValueError, match="needs a time"):
            Arrival(turn, time, after)


def test_no_workflows_no_arrivals() -> None:
    assert arrivals((), "workflow", 1.0) == arrivals((), "poisson", 1.0) == ()


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(1e-3, 1e3),
    st.sampled_from(["even", "poisson", "workflow"]),
    st.integers(0, 9),
)
def test_any_law_delivers_every_turn_in_order_at_the_rate(
    n: int, agents: int, qps: float, law: Law, seed: int
) -> None:
    settings = GeneratorSettings(vocab=9, scale=1e4, workflows=n, agents=agents)
    made = arrivals(generate(settings), law, qps, seed=seed)
    fixed = times(made)
    assert len(made) == n * agents
    assert fixed[0] == 0
    assert fixed == sorted(fixed)
    rate = qps / agents if law == "workflow" else qps
    assert fixed[-1] == pytest.approx((len(fixed) - 1) / rate)
