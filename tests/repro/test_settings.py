from __future__ import annotations

import pytest

from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, method_names
from repro.commands.fidelity import parse_cell
from repro.commands.settings import parse_settings
from repro.profiles import load_profile, override, profile_names
from repro.runners.accuracy import apply_settings


def test_values_are_yaml() -> None:
    parsed = parse_settings(["tau=0.5", "chained=false", "rank_base=null", "base=shared"])
    assert parsed == {"tau": 0.5, "chained": False, "rank_base": None, "base": "shared"}


@pytest.mark.parametrize("text", ["tau", "=1", "tau=[1"])
def test_malformed_settings(text: str) -> None:
    with pytest.raises(UserError):
        parse_settings([text])


def test_a_bare_key_reaches_every_method_that_has_it() -> None:
    chosen = apply_settings(
        ["nonshared", "kvcmas"],
        {"kvcmas": {"tau": 0.1}},
        {"pf_policy": "rotate", "kvcmas.tau": 0.2},
    )
    assert chosen == {
        "nonshared": {"pf_policy": "rotate"},
        "kvcmas": {"tau": 0.2, "pf_policy": "rotate"},
    }


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UserError, match="tau"):
        apply_settings(["kvcmas"], {}, {"taw": 1})


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_valid_and_their_methods_exist(name: str) -> None:
    profile = load_profile(name)
    for method in profile.accuracy.methods:
        make_method(method, profile.accuracy.settings.get(method, {}))
    for cell in profile.fidelity.cells:
        make_method(cell.method, cell.settings)


def test_override_refuses_a_value_out_of_range() -> None:
    with pytest.raises(UserError, match="n"):
        override(load_profile("smoke").accuracy, {"n": 0})


def test_cells_on_the_command_line() -> None:
    cell = parse_cell("kvcmas chained=false rho=0.8")
    assert (cell.method, cell.settings, cell.rho) == ("kvcmas", {"chained": False}, 0.8)


def test_registered_methods_construct_and_describe_themselves() -> None:
    assert {"nonshared", "fullshared", "kvcmas"} <= set(method_names())
    for name in method_names():
        method = make_method(name)
        assert method.name == name
        assert (find_method(name).__doc__ or "").strip()
        assert make_method(name, method.settings()) == method


def test_methods_by_module_path() -> None:
    assert find_method("baselines.nonshared:NonShared").name == "nonshared"
    with pytest.raises(UserError, match="not a kvcmas Method"):
        find_method("baselines.nonshared:Plan")
    with pytest.raises(UserError, match="cannot load"):
        find_method("baselines.nowhere:Method")
