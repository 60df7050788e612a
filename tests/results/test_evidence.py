"""Records and analyses below one folder: found, packed, hashed, and named where damaged."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from results.analysis import AnalysisError
from results.errors import RecordError
from results.evidence import Evidence, digest, read_evidence
from results.records import RunWriter, pack
from results.tables import build_table
from tests.analyses import chain, coverage, ranks

SELECTED = {"layer": 0.3, "deviation": 0.25, "attention": 0.3}


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert read_evidence(tmp_path / "absent") == Evidence()
    assert read_evidence(tmp_path) == Evidence()


def test_analyses_are_found_packed_or_not(tmp_path: Path) -> None:
    chain(0.1, 0.2).write(tmp_path / "one")
    packed = ranks({}).pack(tmp_path / "two")
    (tmp_path / "chain-summary.csv").write_text("# analysis: chain-summary\na\n1\n")
    found = read_evidence(tmp_path)
    assert [analysis.name for analysis in found.analyses] == ["chain", "ranks"]
    plain = read_evidence(ranks({}).write(tmp_path / "plain").parent)
    assert found.analysed("ranks")[0].frame.equals(plain.analyses[0].frame)
    assert found.analysed("ranks")[0].key == plain.analyses[0].key == ranks({}).key
    assert found.analysed("ranks")[0].provenance["command"] == "repro analyze x --out else"
    assert found.where(found.analysed("ranks")[0].key) == packed
    assert found.where("0" * 16) is None


def test_keys_tell_analyses_apart(tmp_path: Path) -> None:
    keys = {ranks({}).key, chain(0.1, 0.2).key, ranks({}, model="another@1").key}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a,source", "a,source,more", r"chain.csv:\d+: 14 cells, not 13"),
        (",0.1\n", ",much\n", r"chain.csv:\d+: error: 'much' is no number"),
        ("request,", "query,", r"chain.csv:\d+: the columns are not request"),
    ],
)
def test_a_damaged_analysis_names_file_and_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = chain(0.1, 0.2).write(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(AnalysisError, match=message):
        read_evidence(tmp_path)


def test_a_packed_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.csv.xz").write_bytes(b"not xz")
    with pytest.raises(AnalysisError, match=r"ranks.csv.xz is damaged"):
        read_evidence(tmp_path)


def test_the_digest_follows_the_records_and_nothing_else(tmp_path: Path) -> None:
    path = chain(0.1, 0.2).write(tmp_path)
    before = digest(tmp_path)
    (tmp_path / "figure.png").write_bytes(b"picture")
    assert digest(tmp_path) == before
    path.write_text(path.read_text() + "\n")
    assert digest(tmp_path) != before


def _write(directory: Path, run) -> None:
    """A run of the factories on disk, its rows under the run's key."""
    writer = RunWriter(directory, run.info)
    for sample in run.samples:
        turns = [t for t in run.turns if t.sample_index == sample.sample_index]
        own = {"run_key": run.info.run_key}
        writer.append_sample(
            [turn.model_copy(update=own) for turn in turns], sample.model_copy(update=own)
        )


def test_deleting_records_empties_what_they_made_and_nothing_else(tmp_path: Path, make_run) -> None:
    for method in ("nonshared", "fullshared", "kvcmas"):
        _write(tmp_path / method, make_run((True, False), method=method))
    coverage(SELECTED).write(tmp_path)

    def cells() -> dict[str, list[list[str]]]:
        evidence = read_evidence(tmp_path)
        return {
            number: build_table(number, evidence.runs, evidence.analyses).display_rows()
            for number in ("1", "2", "4", "7")
        }

    before = cells()
    (tmp_path / "kvcmas" / "records.jsonl").unlink()
    after = cells()
    assert after["2"] == before["2"] and after["7"] == before["7"] == []
    assert after["1"][:2] == before["1"][:2] and after["4"][:2] == before["4"][:2]
    assert [c for c in after["1"][2] if c] == ["gsm8k", "local", "KVCMAS", "cold", "0", "1"]
    (tmp_path / "coverage.csv").unlink()
    assert cells() == after | {"2": []}


def test_a_run_that_two_commands_share_counts_once(tmp_path: Path, make_run) -> None:
    run, other = make_run((True, False)), make_run((True, False), method="nonshared")
    for folder in ("study/kvcmas", "main/kvcmas"):
        _write(tmp_path / folder, run)
    _write(tmp_path / "main" / "nonshared", other)
    cut = tmp_path / "main" / "kvcmas" / "records.jsonl"
    assert next(r.name for r in read_evidence(tmp_path).runs) == str(cut.parent)
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:2]))
    names = [r.directory.relative_to(tmp_path).as_posix() for r in read_evidence(tmp_path).runs]
    assert sorted(names) == ["main/nonshared", "study/kvcmas"]


def test_a_corrupted_record_names_file_and_line(tmp_path: Path, make_run) -> None:
    run = make_run((True, False))
    _write(tmp_path / "run", run)
    rows = tmp_path / "run" / "records.jsonl"
    lines = rows.read_text().splitlines()
    lines[2] = lines[2].replace('"prompt_tokens":10', '"prompt_tokens":11')
    rows.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match=r"records.jsonl:3: "):
        read_evidence(tmp_path)
    packed = tmp_path / "packed"
    rows.write_text("")
    pack(tmp_path / "run", packed / "run")
    (packed / "run" / "records.jsonl.xz").write_bytes(lzma.compress(b'{"kind": "turn"}\n'))
    with pytest.raises(RecordError, match=r"records.jsonl.xz:1: "):
        read_evidence(packed)
