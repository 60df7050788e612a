"""Benches: rounds, random sources, and each bench at a size that takes no time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from kvcmas.engine.cache import Origin
from kvcmas.engine.rope import Rope
from kvcmas.errors import UserError
from repro.cli import app
from repro.runners.allocations import Allocations
from repro.runners.bench_correction import Correction, bench_correction
from repro.runners.bench_executor import bench_executor
from repro.runners.bench_kvcomm import LAYOUTS, bench_kvcomm
from repro.runners.bench_parts import Draw, KVShape, exponents, interleaved
from repro.runners.bench_turn import bench_anchors, bench_turn
from results.goals import read_bench

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

SHAPE = KVShape(2, 2, 16, torch.float32, torch.device("cpu"))


def test_rounds_alternate_and_the_first_is_discarded() -> None:
    order: list[str] = []

    def part(name: str) -> float:
        order.append(name)
        return float(len(order))

    seconds = interleaved(
        {name: lambda name=name: part(name) for name in "ab"},  # type: ignore[misc]
        2,
        lambda step: None,
    )
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": (3.0, 6.0), "b": (4.0, 5.0)}


def test_exponents_are_those_of_a_power_law() -> None:
    sizes = [2, 4, 8]
    fitted = exponents(sizes, [[3 * n**1.5, n] for n in sizes])
    assert fitted == pytest.approx((1.5, 1.0))


def correction(tokens: int, anchors: int) -> Correction:
    rope = Rope(10_000 ** -(torch.arange(0, 16, 2) / 16))
    return Correction.random(SHAPE, rope, tokens, anchors, 8, Draw())


def test_a_correction_is_judged_and_written_in_every_layer() -> None:
    one = correction(40, 3)
    one.run()
    rows = one.turn.prompt.rows(1)
    assert bool((one.buffer.origin[0, rows.start : rows.stop] == Origin.REUSED).all())
    assert bool((one.buffer.origin[1, rows.start : rows.stop] == Origin.CORRECTED).all())
    (decision,) = one.plan().decisions
    assert (decision.reason, decision.entropy is not None) == ("accepted", True)
    floats = 2 * (2 * 2 * 40 * 32) + 3 * 2 * (2 + 1) * 8 * (40 + 32)  # K, V twice; anchors
    assert one.moved_bytes == 4 * floats


@pytest.mark.parametrize("anchors", [2, 10, 20])
def test_a_correction_makes_nothing_larger_than_a_layer(anchors: int) -> None:
    one = correction(3000, anchors)
    with Allocations() as made:
        one.run()
    assert 0 < made.largest <= SHAPE.layer_bytes(3000)


def test_correction_rows(tiny_llama: Loaded) -> None:
    rows = bench_correction(tiny_llama[0], shared=64, anchors=2, wide_shared=0, repeats=1)
    names = [row.name for row in rows]
    assert names[0] == "correction / dense prefill, D=64, 64 tokens"
    assert sum(name.startswith("exponent") for name in names) == 3
    assert all(len(row.values) == 1 for row in rows[:5])
    assert all(value > 0 for row in rows[:5] for value in row.values)
    assert rows[1].values[0] < 1


def test_turn_anchor_and_executor_rows(tiny_llama: Loaded) -> None:
    model = tiny_llama[0]
    for rows in (
        bench_turn(model, contexts=[64], anchors=2, repeats=2),
        bench_anchors(model, shared=64, repeats=2),
        bench_executor(model, shared=64, anchors=2, repeats=2),
    ):
        assert all(len(row.values) == 2 and min(row.values) > 0 for row in rows)
    with pytest.raises(UserError, match="more than the 4096"):
        bench_turn(model, contexts=[4000], anchors=2, repeats=1)


def test_a_trajectory_and_its_first_tokens(tiny_llama: Loaded) -> None:
    layout = replace(LAYOUTS["2k"], shared=48, output=4)
    rows = bench_kvcomm(*tiny_llama, layout, requests=2, repeats=1)
    assert [row.goal for row in rows[:3]] == [2.0, None, 1.0]
    # Two of three agents read what others have read, in each of two requests.
    assert rows[-1].name == "first token equal to dense, 4 accepted calls"
    assert 0 <= rows[-1].values[0] <= 1


def test_the_command_prints_and_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "records" / "anchors.json"
    command = ["bench", "anchors", "--model=tiny-llama", "--shared=32", "--repeats=1"]
    done = CliRunner().invoke(app, [*command, f"--out={out}"])
    assert done.exit_code == 0, done.output
    assert "<= 0.15" in done.output
    record = read_bench(out)
    assert record.bench == "anchors"
    assert "32 shared" in record.title
    assert json.loads(out.read_text())["environment"]["packages"]["torch"]
