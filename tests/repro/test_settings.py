from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, method_names
from repro.commands.fidelity import parse_cell
from repro.commands.settings import check_writable, parse_settings
from repro.profiles import load_profile, override, profile_names
from repro.runners.cells import with_defaults
from repro.runners.offline import store
from workloads import get


def test_values_are_yaml() -> None:
    parsed = parse_settings(["tau=0.5", "chained=false", "rank_base=null", "base=shared"])
    assert parsed == {"tau": 0.5, "chained": False, "rank_base": None, "base": "shared"}


@pytest.mark.parametrize("text", ["tau", "=1", "tau=[1"])
def test_malformed_settings(text: str) -> None:
    with pytest.raises(UserError):
        parse_settings([text])


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_valid_and_their_methods_exist(name: str) -> None:
    profile = load_profile(name)
    for bench in {"gsm8k", *profile.accuracy.benches}:
        accuracy = profile.accuracy.at(bench)
        for cell in with_defaults(accuracy.cells, accuracy.settings):
            make_method(cell.method, cell.settings)
        get(bench, **accuracy.workload.get(bench, {}))
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


@pytest.mark.parametrize(
    "touch", [check_writable, lambda directory: store(directory / "found.json", {"tau": 0.5})]
)
def test_processes_that_share_a_directory_do_not_meet(
    touch: Callable[[Path], None], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(touch, tmp_path) for _ in range(200)]:
            done.result()
    assert {path.name for path in tmp_path.iterdir()} <= {"found.json"}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        check_writable(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write .*found\.json"):
        store(tmp_path / "file" / "found.json", {})
