"""A plan's cells: run once, resumed, failures written down, Ctrl-C clean, time estimated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from repro.cli import app
from repro.profiles import profile_names
from repro.runners.plan import Ended, Plan, PlanCell, chosen, load_plan

# Stands in for `repro`: does what its first word says.
PROGRAM = """
import pathlib, sys, time
word, folder = sys.argv[1], pathlib.Path(sys.argv[-1])
folder.mkdir(parents=True, exist_ok=True)
with (folder / "ran").open("a") as ran:
    ran.write(word + "\\n")
if word == "fail":
    sys.exit("out of luck")
if word == "wait":
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        sys.exit(130)
"""


def plan(out: Path, **commands: str) -> Plan:
    cells = tuple(PlanCell(name=n, command=c, weight=len(n)) for n, c in commands.items())
    return Plan("smoke", cells, out, (sys.executable, "-c", PROGRAM))


def run(one: Plan) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    one.run_all(lambda cell: None, lambda cell, how: ended.update({cell.name: how}))
    return ended


def test_done_cells_are_not_run_again_and_failed_ones_are(tmp_path: Path) -> None:
    one = plan(tmp_path, good="do", bad="fail", last="do")
    assert {name: how.state for name, how in run(one).items()} == {
        "good": "done",
        "bad": "failed",
        "last": "done",
    }
    text = one.failure(one.cells[1]).read_text()
    assert text.startswith("repro fail --profile smoke --out ") and "exit code 1" in text
    assert text.endswith("out of luck\n")
    assert not one.failure(one.cells[0]).exists()
    assert list(run(one)) == ["bad"]
    assert (tmp_path / "runs" / "good" / "ran").read_text() == "do\n"


def test_another_command_is_another_cell(tmp_path: Path) -> None:
    run(plan(tmp_path, one="do"))
    changed = plan(tmp_path, one="do --n 4")
    assert changed.ended(changed.cells[0]).state == "missing"
    assert list(run(changed)) == ["one"]


def test_a_mended_cell_leaves_no_failure_file(tmp_path: Path) -> None:
    broken = plan(tmp_path, one="fail")
    run(broken)
    mended = plan(tmp_path, one="do")
    run(mended)
    assert not mended.failure(mended.cells[0]).exists()


def test_time_is_estimated_from_finished_cells_by_weight(tmp_path: Path) -> None:
    one = plan(tmp_path, aa="do", bbbb="fail", cccccc="fail")
    assert one.estimate() == {"aa": None, "bbbb": None, "cccccc": None}
    run(one)
    state = tmp_path / "state" / "aa.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"seconds": 10.0}))
    left = one.estimate()
    assert left.keys() == {"bbbb", "cccccc"}
    spent = {cell.name: one.ended(cell).seconds for cell in one.cells}
    assert left["bbbb"] == pytest.approx(20 - spent["bbbb"])
    assert left["cccccc"] == pytest.approx(30 - spent["cccccc"])


def test_ctrl_c_reaches_the_running_cell_and_is_written_down(tmp_path: Path) -> None:
    """Only this process gets the signal, as its cell is in a session of its own."""
    code = (
        "from tests.repro.test_plan import plan, run; from pathlib import Path; import signal, sys;"
        "from repro.runners.plan import Interrupted\n"
        # Whoever runs the tests in the background of a shell lets them ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try: run(plan(Path(sys.argv[1]), one='wait', two='do'))\n"
        "except Interrupted: sys.exit(130)"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=root)
    ran = tmp_path / "runs" / "one" / "ran"
    while not ran.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    one = plan(tmp_path, one="wait", two="do")
    assert [one.ended(cell).state for cell in one.cells] == ["interrupted", "missing"]
    assert (tmp_path / "runs" / "one" / "interrupted").exists()


def test_unknown_cells_are_refused_and_the_order_is_the_plans(tmp_path: Path) -> None:
    cells = plan(tmp_path, a="do", b="do", c="do").cells
    assert [cell.name for cell in chosen(cells, ["c", "a"])] == ["a", "c"]
    assert chosen(cells, []) == cells
    with pytest.raises(ValueError, match="no cell 'd'; known: a, b, c"):
        chosen(cells, ["d"])


def test_data_lies_in_folders_named_like_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    lines = ("accuracy --bench gsm8k", "accuracy --bench mmlu", "accuracy --bench gsm8k --data x")
    found = [
        PlanCell(name="a", command=line, weight=1).arguments("cpu", Path("runs"), tmp_path)
        for line in lines
    ]
    assert found[0][3:5] == ("--data", str(tmp_path / "gsm8k"))
    assert "--data" not in found[1] and found[2].count("--data") == 1


@pytest.mark.parametrize("profile", profile_names())
def test_shipped_plans_hold_commands_that_exist(profile: str) -> None:
    cells = load_plan(profile)
    assert len({cell.name for cell in cells}) == len(cells) > 10
    for cell in cells:
        name, *arguments = cell.arguments(profile, Path("records"))
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(name, arguments)  # refuses unknown options
