"""Generated blocks of documents: renewed from records, refused where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcmas.errors import UserError
from repro.cli import app
from results.documents import renew
from results.errors import TableError
from results.goals import BenchRecord, BenchRow
from results.records import RunWriter, pack

TABLE = '<!-- table 1 runs=small columns=method,accuracy_percent where="method={}" {} -->'
VALUE = '<!-- value 1 runs=small column=accuracy_percent where="method={}" -->'


@pytest.fixture
def records(tmp_path: Path, make_info, make_turn, make_sample) -> Path:
    """Two packed runs of two samples; NonShared solves one more than KVCMAS."""
    for method, solved in (("nonshared", (True, True)), ("kvcmas", (True, False))):
        info = make_info(method=method, settings={})
        writer = RunWriter(tmp_path / "runs" / method, info)
        for index, correct in enumerate(solved):
            writer.append_sample(
                [make_turn(index, run_key=info.run_key)],
                make_sample(index, run_key=info.run_key, correct=correct),
            )
        pack(tmp_path / "runs" / method, tmp_path / "records" / "small" / method)
    return tmp_path / "records"


def test_blocks_are_made_from_the_records(records: Path) -> None:
    text = f"before {VALUE.format('KVCMAS')}old<!-- end --> after\n"
    text += f"{TABLE.format('NonShared', 'footer=no')}\nold\n<!-- end -->\n"
    new = renew(text, records, "a.md")
    assert "before" in new and "after" in new and "old" not in new
    assert f"{VALUE.format('KVCMAS')}50.0 [" in new
    rows = [line for line in new.splitlines() if line.startswith("| ")]
    assert len(rows) == 3
    assert rows[-1].startswith("| NonShared | 100.0 [")
    assert "git commit" not in new
    assert "git commit" in renew(new.replace("footer=no", ""), records, "a.md")
    assert renew(new, records, "a.md") == new


def test_rows_of_several_settings_are_told_apart(
    tmp_path: Path, records: Path, make_info, make_turn, make_sample
) -> None:
    info = make_info(method="nonshared", settings={}, engine="vllm")
    writer = RunWriter(tmp_path / "other", info)
    turn = make_turn(0, run_key=info.run_key)
    writer.append_sample([turn], make_sample(0, run_key=info.run_key, correct=True))
    pack(tmp_path / "other", records / "vllm" / "nonshared")
    mark = "<!-- table 1 runs=. columns=method footer=no -->"
    made = renew(f"{mark}x<!-- end -->", records, "a.md")
    assert "| Setting | Method |" in made and "| engine=vllm | NonShared |" in made


def test_a_text_without_marks_is_left_alone(records: Path) -> None:
    assert renew("| a | b |\n<!-- a comment -->", records, "a.md") == (
        "| a | b |\n<!-- a comment -->"
    )


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (VALUE.format("FullShared"), "0 rows match"),
        ("<!-- value 1 runs=small column=accuracy_percent -->", "2 rows match"),
        ("<!-- value 1 runs=small -->", "needs column"),
        ("<!-- value 1 runs=small column=speed -->", "no column speed"),
        ("<!-- table 99 runs=small -->", "unknown table"),
        ("<!-- table 1 runs=nowhere -->", "nowhere is not a directory"),
        ("<!-- table 1 runs=small colour=red -->", "no option colour"),
        ("<!-- table 1 runs=small columns -->", "not key=value"),
        ("<!-- claims runs=nowhere -->", "nowhere is not a directory"),
        ("<!-- figure 4 runs=. -->", "no option runs"),
        ("<!-- figure 4 -->", "needs folder"),
    ],
)
def test_a_mark_that_makes_no_sense_is_named(records: Path, mark: str, message: str) -> None:
    with pytest.raises(TableError, match=message) as raised:
        renew(f"{mark}x<!-- end -->", records, "a.md")
    assert str(raised.value).startswith("a.md: ")


def test_the_ledger_and_figures_have_marks_as_well(records: Path) -> None:
    text = renew("<!-- claims runs=. --><!-- end -->", records, "a.md")
    assert "**Claims: 37 not measured**" in text and "| C37 | " in text
    mark = "<!-- figure 4 folder=../figures --><!-- end -->"
    assert "Figure 4 has no records yet." in renew(mark, records, "a.md")
    (records / "figures").mkdir()
    (records / "figures" / "figure4.png").touch()
    assert "![Figure 4](../figures/figure4.png)" in renew(mark, records, "a.md")


def test_the_commands(tmp_path: Path, records: Path) -> None:
    run = CliRunner().invoke
    packed = run(app, ["pack", str(tmp_path / "runs"), str(tmp_path / "more" / "small")])
    assert packed.exit_code == 0, packed.output
    assert "packed 2 runs" in packed.output
    document = tmp_path / "page.md"
    document.write_text(f"{VALUE.format('KVCMAS')}<!-- end -->\n")
    command = ["docs", str(document), "--records", str(tmp_path / "more")]
    stale = run(app, [*command, "--check"])
    assert isinstance(stale.exception, UserError)
    assert "+<!-- value" in stale.output
    assert run(app, command).exit_code == 0
    assert "50.0" in document.read_text()
    assert run(app, [*command, "--check"]).exit_code == 0


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for command in (["pack", str(tmp_path), str(tmp_path)], ["docs", str(tmp_path / "no.md")]):
        result = CliRunner().invoke(app, command)
        assert isinstance(result.exception, UserError)
        assert str(tmp_path) in str(result.exception)


def test_a_bench_is_shown_beside_its_goals(tmp_path: Path) -> None:
    text = "<!-- bench turn -->old<!-- end -->"
    assert renew(text, tmp_path, "a.md").count("turn has no record yet.") == 1
    row = BenchRow(name="KVCMAS / NonShared", values=(0.07,), goal=0.08)
    record = BenchRecord(bench="turn", title="Layout T", rows=(row,), environment={})
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "turn.json").write_text(record.model_dump_json())
    made = renew(text, tmp_path, "a.md")
    assert "**Layout T**" in made
    assert "| KVCMAS / NonShared | 0.07 |  | 1 | <= 0.08 | yes |" in made
    with pytest.raises(TableError, match="no option runs"):
        renew("<!-- bench turn runs=. --><!-- end -->", tmp_path, "a.md")
