"""Tables: the registry, what may share one, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from results.comparable import split_settings
from results.errors import TableError
from results.records import Run
from results.tables import Column, TableSpec, build_table, known_tables, register


def test_an_unknown_table_lists_the_known_ones() -> None:
    with pytest.raises(TableError, match=r"unknown table '99'; known: 1"):
        build_table("99", [])
    assert "1" in known_tables()


def test_a_number_is_given_once() -> None:
    with pytest.raises(TableError, match="registered twice"):
        register("1", title="", columns=(), kinds=(), command="")(lambda runs: pd.DataFrame())


def test_runs_of_other_kinds_are_left_out(make_run) -> None:
    table = build_table("1", [make_run(kind="fidelity")])
    assert len(table.frame) == 0
    assert table.footer == ("no records yet; made by: repro accuracy --bench BENCH",)
    assert table.display_rows() == []


def test_one_setting_needs_no_label(make_run) -> None:
    table = build_table("1", [make_run(method="nonshared"), make_run(method="kvcmas")])
    assert "setting" not in table.frame
    assert table.headings()[0] == "Bench"


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({"attention": "eager"}, ["attention=eager", "attention=sdpa"]),
        ({"engine": "vllm"}, ["engine=transformers", "engine=vllm"]),
        ({"hardware": "GPU"}, ["hardware=GPU", "hardware=Some CPU"]),
        ({"dtype": "bfloat16"}, ["dtype=bfloat16", "dtype=float32"]),
        ({"data": "procedural"}, ["data=local", "data=procedural"]),
        ({"max_new_tokens": 64}, ["max_new_tokens=32", "max_new_tokens=64"]),
        (
            {"model": "m", "dtype": "float16"},
            ["model=m, dtype=float16", "model=tiny-llama, dtype=float32"],
        ),
    ],
)
def test_runs_that_are_not_comparable_are_labelled_and_never_paired(
    make_run, change: dict[str, object], labels: list[str]
) -> None:
    runs = [make_run(method="nonshared"), make_run(method="kvcmas", **change)]
    table = build_table("1", runs)
    assert table.frame["setting"].tolist() == labels
    assert table.headings()[0] == "Setting"
    assert table.frame["difference_points"].isna().all()


def test_a_setting_without_rows_labels_no_other(make_run) -> None:
    def kvcmas_only(runs: Sequence[Run]) -> pd.DataFrame:
        return pd.DataFrame([{"method": "kvcmas"} for r in runs if r.info.method == "kvcmas"])

    columns = (Column("method", "Method", "string"),)
    spec = TableSpec("t", "Title", columns, "repro", ("accuracy",), kvcmas_only)
    runs = [make_run(method="kvcmas"), make_run(method="nonshared", dtype="bfloat16")]
    assert spec.table(runs).headings() == ["Method"]
    runs.append(make_run(method="kvcmas", engine="vllm"))
    assert spec.table(runs).frame["setting"].tolist() == ["engine=transformers", "engine=vllm"]


def test_replays_of_other_requests_are_told_apart(make_fidelity, make_replay) -> None:
    def replay(method: str, first: int, **info: object) -> Run:
        rows = tuple(make_fidelity(n, (), (0.1,), warm=n < first) for n in range(first + 1))
        return make_replay(rows, method=method, **info)

    runs = [replay("kvcmas", 1), replay("nonshared", 1)]
    assert "" in dict(split_settings(runs))
    runs.append(replay("kvcmas", 2, settings={"tau": 0.2}))
    labels = {label: [run.info.settings for run in group] for label, group in split_settings(runs)}
    assert list(labels) == ["evaluated from s1", "evaluated from s2"]
    assert labels["evaluated from s2"] == [{"tau": 0.2}]


def test_two_benches_on_their_own_data_need_no_label(make_run) -> None:
    runs = [
        make_run(bench="gsm8k", data_sha256="1" * 64, max_new_tokens=64),
        make_run(bench="mmlu", data_sha256="2" * 64, max_new_tokens=16),
    ]
    assert "setting" not in build_table("1", runs).frame
    changed = make_run(bench="mmlu", data_sha256="3" * 64, max_new_tokens=16)
    assert "setting" in build_table("1", [*runs, changed]).frame


def test_copies_of_a_run_are_refused(make_run) -> None:
    with pytest.raises(TableError, match="are copies of run"):
        build_table("1", [make_run(), make_run()])


def test_generated_data_are_named_first(make_run) -> None:
    table = build_table("1", [make_run(data="procedural")])
    assert table.footer[0].startswith("data=procedural: generated problems, NOT")
    assert table.frame["data"].tolist() == ["procedural"]
    assert not any("procedural" in line for line in build_table("1", [make_run()]).footer)


def test_the_footer_says_where_numbers_come_from(make_run) -> None:
    table = build_table("1", [make_run(seed=0), make_run(seed=1)])
    text = "\n".join(table.footer)
    for part in (
        "model: tiny-llama@r1",
        "dtype: float32",
        "engine: transformers",
        "attention: sdpa",
        "hardware: Some CPU (cpu)",
        "profile: smoke",
        "n: 2",
        "seeds: 0, 1",
        "git commit: abc1234; runs: 2",
    ):
        assert part in text


def test_an_interrupted_run_says_so(make_run) -> None:
    run = make_run(n=5)
    assert (
        f"incomplete: run {run.info.run_key} has 2 of 5 samples" in build_table("1", [run]).footer
    )


def test_files_hold_full_values_and_the_footer(make_run, tmp_path: Path) -> None:
    table = build_table("1", [make_run((True, False, False), label="r=8")])
    table.to_csv(tmp_path / "1.csv")
    read = pd.read_csv(tmp_path / "1.csv", comment="#")
    assert read.loc[0, "accuracy_percent"] == pytest.approx(100 / 3, rel=1e-11)
    assert read.loc[0, "pool_bytes"] == 1_500_000
    assert pd.isna(read.loc[0, "kl_nats"])  # not measured is empty, not 0
    assert "# git commit: abc1234" in (tmp_path / "1.csv").read_text()
    table.to_parquet(tmp_path / "1.parquet")
    stored = pd.read_parquet(tmp_path / "1.parquet")
    pd.testing.assert_frame_equal(stored, table.frame)
    assert stored.attrs["footer"] == list(table.footer)


def test_markup_escapes_what_its_syntax_uses(make_run) -> None:
    table = build_table("1", [make_run(label="a_b|50%")])
    row = table.to_markdown().splitlines()[4]
    assert r"a_b\|50%" in row
    latex = table.to_latex()
    assert r"a\_b|50\%" in latex
    body = next(line for line in latex.splitlines() if "KVCMAS" in line)
    assert body.count("&") == len(table.headings()) - 1
    assert r"\footnotesize model: tiny-llama@r1" in latex


def test_columns_can_be_chosen(make_run) -> None:
    table = build_table("1", [make_run()])
    assert table.headings(["n", "method"]) == ["n", "Method"]
    assert table.display_rows(["n", "method"]) == [["2", "KVCMAS"]]
    with pytest.raises(TableError, match="no column speed"):
        table.headings(["speed"])
