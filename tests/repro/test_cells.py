"""Which cells a command line asks for, and what is set apart for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.models import ResolvedModel
from repro.profiles import CellSpec, load_profile
from repro.runners.accuracy import Setup, make_cells
from repro.runners.cells import (
    BUDGETED,
    apply_settings,
    choose_cells,
    depends_on_order,
    variant,
    with_defaults,
    with_rho,
)
from workloads import get
from workloads.base import Dataset, Sample

PLAIN = CellSpec(method="nonshared")
FIXED = CellSpec(method="kvcmas", settings={"tau": 0.1})
HELD = CellSpec(method="kvcmas", rho=0.8)


def test_methods_choose_among_the_profiles_cells() -> None:
    cells = [PLAIN, FIXED, HELD]
    assert choose_cells(cells, None) == cells
    assert choose_cells(cells, ["kvcmas"]) == [FIXED, HELD]
    assert choose_cells(cells, ["kvcomm", "nonshared"]) == [CellSpec(method="kvcomm"), PLAIN]
    with pytest.raises(UserError, match="kvcmas"):
        choose_cells(cells, ["kvcmass"])


def test_a_profiles_settings_lie_below_those_of_a_cell() -> None:
    settings = {"kvcmas": {"tau": 0.5, "rank_base": 8}}
    assert [cell.settings for cell in with_defaults([PLAIN, FIXED], settings)] == [
        {},
        {"tau": 0.1, "rank_base": 8},
    ]


def test_a_bare_key_reaches_every_method_that_has_it() -> None:
    changed = apply_settings([PLAIN, FIXED], {"pf_policy": "rotate", "kvcmas.tau": 0.2})
    assert [cell.settings for cell in changed] == [
        {"pf_policy": "rotate"},
        {"tau": 0.2, "pf_policy": "rotate"},
    ]


def test_a_threshold_set_by_hand_is_not_calibrated() -> None:
    (changed,) = apply_settings([HELD], {"tau": 0.2})
    assert (changed.rho, changed.settings) == (None, {"tau": 0.2})
    (kept,) = apply_settings([HELD], {"rank_base": 8})
    assert (kept.rho, kept.settings) == (0.8, {"rank_base": 8})
    with pytest.raises(UserError, match="rho= finds tau, give one of them"):
        apply_settings([CellSpec(method="kvcmas", rho=0.8, settings={"tau": 0.1})], {})


def test_unknown_keys_and_illegal_values_are_refused() -> None:
    with pytest.raises(UserError, match="tau"):
        apply_settings([HELD], {"taw": 1})
    with pytest.raises(UserError, match="rank_base"):
        apply_settings([HELD], {"rank_base": 0})
    with pytest.raises(UserError, match="kvcomm"):
        apply_settings([HELD], {"kvcomm.gamma": 1})


def test_one_ratio_for_all_methods_that_have_a_budget() -> None:
    cells = with_rho([PLAIN, FIXED, CellSpec(method="cacheblend")], 0.7)
    assert [(cell.rho, cell.settings) for cell in cells] == [(None, {}), (0.7, {}), (0.7, {})]


@pytest.mark.parametrize("method", BUDGETED)
def test_methods_with_a_budget_exist(method: str) -> None:
    make_method(method)


@pytest.mark.parametrize(
    ("method", "settings", "learns"),
    [
        ("nonshared", {}, False),
        ("fullshared", {}, False),
        ("droidspeak", {}, False),
        ("cacheblend", {}, False),
        ("relaycaching", {}, False),
        ("kvcomm", {}, True),
        ("kvcmas", {}, True),
        ("fullshared", {"pf_policy": "rotate"}, True),
    ],
)
def test_only_methods_that_learn_depend_on_the_order(
    method: str, settings: dict[str, object], learns: bool
) -> None:
    assert depends_on_order(make_method(method, settings)) == learns


def test_the_label_says_what_is_not_the_default() -> None:
    assert variant(PLAIN) == ""
    assert variant(CellSpec(method="kvcmas", settings={"tau": 0.3})) == ""
    assert variant(FIXED) == "tau=0.1"
    cell = CellSpec(method="kvcmas", settings={"chained": False}, rho=0.8)
    assert variant(cell) == "chained=False rho=0.8"
    assert variant(CellSpec(method="kvcmas", accept_all=True)) == "accept all"


def dataset(count: int, name: str = "some") -> Dataset:
    samples = tuple(Sample(f"{name}-{i}", f"{name}: {i}?", "1") for i in range(count))
    return Dataset(samples, "local", name, name)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(
        workload=get("gsm8k"),
        dataset=dataset(10),
        n=6,
        model=ResolvedModel("m", tmp_path, "r", "local", None),
        dtype="float32",
        device="cpu",
        max_new_tokens=8,
        final_tokens=None,
        profile="smoke",
        out=tmp_path,
    )


def test_reserved_samples_are_never_evaluated_ones(setup: Setup) -> None:
    rest = replace(setup, warm=3, calibration=1)
    assert [s.id for s in rest.reserved] == ["some-6", "some-7", "some-8", "some-9"]
    with pytest.raises(UserError, match=r"leaves 4 samples .* 3 to fill pools and 2 to calibrate"):
        replace(setup, warm=3, calibration=2).reserved  # noqa: B018
    # A split of its own may repeat evaluated questions.
    other = dataset(4, "other").samples
    mixed = replace(dataset(0), samples=(setup.dataset.samples[2], *other))
    assert replace(setup, warm=2, held_out=mixed).reserved == other[:2]


def test_methods_that_learn_have_a_cell_per_order(setup: Setup) -> None:
    specs = [HELD, PLAIN, CellSpec(method="fullshared")]
    cells = make_cells(setup, specs, [3, 4], lambda spec: {"tau": 0.25})
    assert [(c.method, c.seed) for c in cells] == [
        ("nonshared", 3),
        ("kvcmas", 3),
        ("kvcmas", 4),
        ("fullshared", 3),
    ]
    assert [c.target_rho for c in cells] == [None, 0.8, 0.8, None]
    assert cells[1].settings["tau"] == 0.25 and cells[1].label == "rho=0.8"
    assert len({c.key for c in cells}) == 4
    assert setup.samples(3) != setup.samples(4)
    ids = [{sample.id for sample in setup.samples(seed)} for seed in (3, 4)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 9},
        {"final_tokens": 4},
        {"warm": 2},
        {"dataset": dataset(10, "other")},
        {"n": 5},
        {"workload": get("gsm8k", prompts="steps")},
        {"workload_options": {"observation_chars": 9}},
    ],
)
def test_the_key_covers_what_changes_a_result(setup: Setup, change: dict[str, object]) -> None:
    def key(of: Setup) -> str:
        return make_cells(of, [FIXED], [0], lambda spec: {})[0].key

    assert key(replace(setup, **change)) != key(setup)  # type: ignore[arg-type]


def test_every_benchmark_of_a_profile_is_valid() -> None:
    for name in ("smoke", "cpu", "paper"):
        accuracy = load_profile(name).accuracy
        for bench in accuracy.benches:
            assert accuracy.at(bench).cells
