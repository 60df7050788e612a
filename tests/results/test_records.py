"""Run directories: what a crash, a full disk or a foreign hand leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from results.errors import RecordError
from results.records import (
    PACKED_FILE,
    ROWS_FILE,
    RUN_FILE,
    RunInfo,
    RunWriter,
    normalised,
    pack,
    read_run,
    read_runs,
    run_key,
)


@pytest.fixture
def info(make_info) -> RunInfo:
    return make_info()


@pytest.fixture
def append(info: RunInfo, make_turn, make_sample):
    """Append sample ``index`` with two turns."""

    def add(writer: RunWriter, index: int, **changes: object) -> None:
        turns = [
            make_turn(index, run_key=info.run_key, turn_index=turn, **changes) for turn in (0, 1)
        ]
        # A line separator that is not \n must not end a row.
        sample = make_sample(index, run_key=info.run_key, outputs={"A1": "a\u2028b\nc\x85"})
        writer.append_sample(turns, sample)

    return add


@pytest.fixture
def written(tmp_path: Path, info: RunInfo, append) -> Path:
    """A run directory with three samples."""
    writer = RunWriter(tmp_path / "run", info)
    for index in range(3):
        append(writer, index)
    return tmp_path / "run"


def test_what_was_written_is_what_is_read(written: Path, info: RunInfo, make_turn) -> None:
    run = read_run(written)
    assert run.info == info
    assert [turn.sample_index for turn in run.turns] == [0, 0, 1, 1, 2, 2]
    assert [sample.sample_index for sample in run.samples] == [0, 1, 2]
    assert run.turns[1] == make_turn(0, run_key=info.run_key, turn_index=1)
    assert run.samples[0].outputs == {"A1": "a\u2028b\nc\x85"}


def test_replayed_turns_are_kept_apart_from_served_ones(
    tmp_path: Path, info: RunInfo, make_fidelity, make_fidelity_edge, make_sample
) -> None:
    edge = make_fidelity_edge((0.0, 0.1, 0.2, 0.3), 0.5)
    writer = RunWriter(tmp_path, info)
    for index in range(2):
        turns = [
            make_fidelity(index, (edge,), (0.1, 0.2), run_key=info.run_key, turn_index=turn)
            for turn in (0, 1)
        ]
        writer.append_sample(turns, make_sample(index, run_key=info.run_key))
    run = read_run(tmp_path)
    assert (run.turns, len(run.samples)) == ((), 2)
    assert [(turn.sample_index, turn.turn_index) for turn in run.fidelity] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert run.fidelity[2:] == tuple(turns)
    rows = tmp_path / ROWS_FILE
    rows.write_bytes(rows.read_bytes()[:-1])  # the second sample's row is torn
    assert len(read_run(tmp_path).fidelity) == 2
    assert RunWriter(tmp_path, info).completed() == 1


def test_a_repeated_replay_may_differ_in_its_times_alone(make_fidelity) -> None:
    assert normalised([make_fidelity()]) == normalised([make_fidelity(ttft_s=9.0, e2e_s=9.0)])
    assert normalised([make_fidelity()]) != normalised([make_fidelity(kl=(0.1,))])


def test_a_kill_at_any_byte_of_a_sample_loses_that_sample_only(
    written: Path, info: RunInfo, append, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # there would be thousands
    rows = written / ROWS_FILE
    whole = rows.read_bytes()
    lines = whole.splitlines(keepends=True)
    third = len(b"".join(lines[:6]))
    seams = {third, third + len(lines[6]), third + len(lines[6] + lines[7]), len(whole) - 1}
    for length in range(third, len(whole)):
        rows.write_bytes(whole[:length])
        run = read_run(written)
        assert (len(run.samples), len(run.turns)) == (2, 4)
        if length % 50 == 0 or seams & {length - 1, length, length + 1}:
            writer = RunWriter(written, info)
            assert writer.completed() == 2
            assert rows.read_bytes() == whole[:third]
            append(writer, 2)
            assert rows.read_bytes() == whole
    rows.write_bytes(whole)
    assert RunWriter(written, info).completed() == 3


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_truncation_keeps_the_first_samples_and_drops_a_torn_line(
    written: Path, info: RunInfo, append, kept: int
) -> None:
    rows = written / ROWS_FILE
    whole = rows.read_bytes()
    rows.write_bytes(whole + b'{"kind": "tu')
    writer = RunWriter(written, info)
    writer.truncate_to(kept)
    assert writer.completed() == kept == RunWriter(written, info).completed()
    assert rows.read_bytes() == b"".join(whole.splitlines(keepends=True)[: 3 * kept])
    for index in range(kept, 3):
        append(writer, index)
    assert rows.read_bytes() == whole


def test_truncation_cannot_invent_samples(written: Path, info: RunInfo) -> None:
    with pytest.raises(RecordError, match="holds 3 complete samples, cannot keep 4"):
        RunWriter(written, info).truncate_to(4)


def test_a_crash_while_truncating_leaves_the_old_file(
    written: Path, info: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (written / ROWS_FILE).read_bytes()
    writer = RunWriter(written, info)

    def crash(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(RecordError, match=r"cannot write .*records\.jsonl: I/O error"):
        writer.truncate_to(1)
    assert (written / ROWS_FILE).read_bytes() == whole
    assert writer.completed() == 3


def test_a_resumed_run_equals_another_but_for_timings(tmp_path: Path, info, append) -> None:
    for name, times in (("a", (0.5, 1.0)), ("b", (0.7, 3.0))):
        append(RunWriter(tmp_path / name, info), 0, ttft_s=times[0], e2e_s=times[1])
    one, two = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    assert one.turns != two.turns
    assert normalised(one.turns) == normalised(two.turns)
    assert normalised(one.samples) == normalised(two.samples)


def test_normalised_rows_still_differ_in_what_matters(make_turn) -> None:
    assert normalised([make_turn()]) != normalised([make_turn(pool_bytes=7)])
    assert normalised([make_turn()]) != normalised([make_turn(output_tokens=4)])


def test_a_directory_of_another_run_is_refused_naming_both(written: Path, make_info) -> None:
    other = make_info(method="kvcomm")
    mine = read_run(written).info.run_key
    with pytest.raises(RecordError, match=rf"holds run {mine} \(kvcmas .*not {other.run_key}"):
        RunWriter(written, other)


def test_rows_without_run_json_are_not_adopted(written: Path, info: RunInfo) -> None:
    (written / RUN_FILE).unlink()
    with pytest.raises(RecordError, match=r"has no run\.json beside it"):
        RunWriter(written, info)
    with pytest.raises(RecordError, match=r"has no run\.json"):
        read_run(written)


def test_the_first_run_json_stays(written: Path, make_info) -> None:
    before = (written / RUN_FILE).read_bytes()
    RunWriter(written, make_info(run_key=read_run(written).info.run_key, profile="later"))
    assert (written / RUN_FILE).read_bytes() == before


def test_a_malformed_line_is_named_by_file_and_number(written: Path, info: RunInfo) -> None:
    rows = written / ROWS_FILE
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:4], b'{"kind": "turn"}\n', *lines[5:]]))
    for damaged in (lambda: read_run(written), lambda: RunWriter(written, info)):
        with pytest.raises(RecordError, match=r"records\.jsonl:5: turn: run_key: Field required"):
            damaged()
    rows.write_bytes(b"".join([*lines[:4], b"not json\n", *lines[5:]]))
    with pytest.raises(RecordError, match=r"records\.jsonl:5: Invalid JSON"):
        read_run(written)


def test_a_number_written_as_text_is_damage(written: Path) -> None:
    rows = written / ROWS_FILE
    rows.write_bytes(rows.read_bytes().replace(b'"turn_index":1', b'"turn_index":"1"', 1))
    with pytest.raises(RecordError, match=r"records\.jsonl:2: turn: turn_index: .* valid integer"):
        read_run(written)


def test_a_malformed_run_json_is_named(written: Path) -> None:
    (written / RUN_FILE).write_text('{"schema_version": 2}')
    with pytest.raises(RecordError, match=r"run\.json: schema_version: Input should be 1"):
        read_run(written)


def test_missing_and_foreign_rows_are_refused(written: Path, info: RunInfo) -> None:
    rows = written / ROWS_FILE
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:3], *lines[6:]]))
    with pytest.raises(RecordError, match=r"records\.jsonl:4: turn of sample 2 .* where sample 1"):
        read_run(written)
    rows.write_bytes(lines[0].replace(info.run_key.encode(), b"f" * 16))
    with pytest.raises(RecordError, match=r"records\.jsonl:1: row of run f{16}"):
        read_run(written)


def test_samples_are_appended_in_order_and_to_their_run(written, info, append, make_sample) -> None:
    writer = RunWriter(written, info)
    with pytest.raises(RecordError, match=r"sample 5 .* where sample 3"):
        append(writer, 5)
    with pytest.raises(RecordError, match=r"row of run 0{16}"):
        writer.append_sample([], make_sample(3))
    assert writer.completed() == 3


def test_two_writers_on_one_directory_are_noticed(written: Path, info: RunInfo, append) -> None:
    first, second = RunWriter(written, info), RunWriter(written, info)
    append(first, 3)
    with pytest.raises(RecordError, match="changed by another process"):
        append(second, 3)
    assert len(read_run(written).samples) == 4


def test_a_full_disk_is_reported_and_the_write_taken_back(
    written: Path, info: RunInfo, append, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(written, info)
    whole = (written / ROWS_FILE).read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match="the disk is full; free some space"):
            append(writer, 3)
    assert (written / ROWS_FILE).read_bytes() == whole
    append(writer, 3)
    assert len(read_run(written).samples) == 4


def test_an_unwritable_directory_is_one_clear_line(tmp_path: Path, info: RunInfo) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot write .*file/run: Not a directory"):
        RunWriter(tmp_path / "file" / "run", info)
    with pytest.raises(RecordError, match=r"cannot write .*file: File exists"):
        RunWriter(tmp_path / "file", info)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not stop root")
def test_a_read_only_directory_fails_at_once(written: Path, info: RunInfo) -> None:
    (written / ROWS_FILE).chmod(0o400)
    with pytest.raises(RecordError, match="Permission denied"):
        RunWriter(written, info)


def test_runs_are_found_at_any_depth(tmp_path: Path, make_info) -> None:
    for name, method in (("b/deep", "kvcomm"), ("a", "kvcmas")):
        RunWriter(tmp_path / name, make_info(method=method))
    runs = read_runs(tmp_path)
    assert [run.info.method for run in runs] == ["kvcmas", "kvcomm"]
    assert runs[0].directory == tmp_path / "a"
    assert runs[0].samples == ()
    with pytest.raises(RecordError, match="is not a directory"):
        read_runs(tmp_path / "nowhere")


def test_run_key_depends_on_content_not_on_order() -> None:
    key = run_key({"method": "kvcmas", "settings": {"r": 32, "tau": 0.3}})
    assert key == run_key({"settings": {"tau": 0.3, "r": 32}, "method": "kvcmas"})
    assert key != run_key({"method": "kvcmas", "settings": {"r": 32, "tau": 0.31}})
    assert len(key) == 16
    # Pinned: a changed hash would silently orphan every interrupted run.
    assert run_key({"a": [1, None, "é"]}) == "e40b43fe4b99c3e3"
    for value in (float("nan"), object()):
        with pytest.raises(RecordError, match="run key"):
            run_key({"a": value})


def test_a_packed_run_reads_like_the_run(tmp_path: Path, written: Path, info: RunInfo) -> None:
    pack(written, tmp_path / "packed")
    pack(written, tmp_path / "again")
    packed, run = read_run(tmp_path / "packed"), read_run(written)
    assert (packed.info, packed.turns, packed.samples) == (run.info, run.turns, run.samples)
    assert (tmp_path / "packed" / PACKED_FILE).read_bytes() == (
        tmp_path / "again" / PACKED_FILE
    ).read_bytes()
    with pytest.raises(RecordError, match="packed run"):
        RunWriter(tmp_path / "packed", info)


def test_a_packed_run_keeps_seven_digits_and_no_torn_sample(
    tmp_path: Path, info: RunInfo, append
) -> None:
    writer = RunWriter(tmp_path / "run", info)
    append(writer, 0, e2e_s=1.23456789)
    with (tmp_path / "run" / ROWS_FILE).open("ab") as file:
        file.write(b'{"kind": "turn"')
    pack(tmp_path / "run", tmp_path / "packed")
    assert [turn.e2e_s for turn in read_run(tmp_path / "packed").turns] == [1.234568] * 2


def test_a_packed_run_names_no_folder_of_its_machine(tmp_path: Path, make_info) -> None:
    info = make_info(command="repro fidelity --trace '/a b/c d.jsonl' --out runs")
    RunWriter(tmp_path / "run", info)
    pack(tmp_path / "run", tmp_path / "packed")
    command = read_run(tmp_path / "packed").info.command
    assert command == "repro fidelity --trace 'c d.jsonl' --out runs"


def test_a_damaged_pack_is_named(tmp_path: Path, written: Path) -> None:
    pack(written, tmp_path / "packed")
    path = tmp_path / "packed" / PACKED_FILE
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=f"{PACKED_FILE} is damaged"):
        read_run(tmp_path / "packed")
