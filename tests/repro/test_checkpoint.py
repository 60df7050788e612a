from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcmas.engine.contract import State
from kvcmas.errors import UserError
from repro.runners.checkpoint import Checkpoint


def state(**values: float) -> State:
    return State({"order": list(values)}, {n: {"x": torch.tensor([v])} for n, v in values.items()})


def test_nothing_saved_is_nothing_covered(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path).load() == (0, None)


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path)
    writer.save(1, state(a=1.0, b=2.0))
    writer.save(2, state(b=2.0, c=3.0))
    samples, found = Checkpoint(tmp_path).load()
    assert samples == 2
    assert found is not None
    assert found.meta == {"order": ["b", "c"]}
    assert {n: e["x"].item() for n, e in found.entries.items()} == {"b": 2.0, "c": 3.0}
    assert len(list(tmp_path.glob("*.safetensors"))) == 2, "what is not named is gone"


def test_entries_are_written_once(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path)
    writer.save(1, state(a=1.0))
    file = next(tmp_path.glob("*.safetensors"))
    before = file.stat().st_mtime_ns
    writer.save(2, state(a=1.0, b=2.0))
    assert file.stat().st_mtime_ns == before


def test_a_write_that_never_reached_the_index_does_not_count(tmp_path: Path) -> None:
    writer = Checkpoint(tmp_path)
    writer.save(1, state(a=1.0))
    (tmp_path / "index.json.tmp").write_text("{")
    (tmp_path / "left-over.safetensors").write_bytes(b"torn")
    samples, found = Checkpoint(tmp_path).load()
    assert samples == 1
    assert found is not None
    assert list(found.entries) == ["a"]


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    Checkpoint(tmp_path).save(1, state(a=1.0))
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="damaged"):
        Checkpoint(tmp_path).load()
