from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.engine.segments import Prompt, Segment, ids_sha256, pf, ph

IDS = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
SEGMENTS = st.one_of(
    IDS.map(pf), st.tuples(st.sampled_from(["q", "out0", "obs1@2"]), IDS).map(lambda s: ph(*s))
)
PROMPTS = (
    st.lists(SEGMENTS, min_size=1, max_size=8)
    .filter(any)
    .map(lambda segments: Prompt(tuple(segments)))
)


def test_a_ph_names_its_slot_and_a_pf_has_none() -> None:
    assert ph("q", [1, 2]) == Segment("PH", (1, 2), "q")
    assert pf([1, 2]) == Segment("PF", (1, 2))
    with pytest.raises(ValueError, match="slot"):
        Segment("PH", (1,))
    with pytest.raises(ValueError, match="slot"):
        Segment("PF", (1,), "q")


@pytest.mark.parametrize("segments", [(), (pf([]),), (pf([]), ph("q", []))])
def test_a_prompt_needs_a_token(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Prompt(segments)


@given(PROMPTS)
def test_rows_partition_the_prompt_in_order(prompt: Prompt) -> None:
    rows = [row for i in range(len(prompt.segments)) for row in prompt.rows(i)]
    assert rows == list(range(len(prompt)))
    assert len(prompt) == len(prompt.ids) == prompt.starts[-1]
    assert all(low <= high for low, high in pairwise(prompt.starts))
    for i, segment in enumerate(prompt.segments):
        assert tuple(prompt.ids[row] for row in prompt.rows(i)) == segment.ids


@given(PROMPTS)
def test_shared_are_the_ph_that_hold_a_token(prompt: Prompt) -> None:
    shared = list(prompt.shared())
    assert shared == sorted(shared)
    for i, segment in enumerate(prompt.segments):
        assert (i in shared) == (segment.kind == "PH" and len(segment.ids) > 0)
        if segment.kind == "PH":
            assert prompt.slot(i) == segment.slot
        else:
            with pytest.raises(ValueError, match="not shared"):
                prompt.slot(i)


@given(PROMPTS, st.data())
def test_the_hash_does_not_depend_on_the_segmentation(prompt: Prompt, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(prompt)), max_size=5)))
    parts = [prompt.ids[a:b] for a, b in pairwise([0, *cuts, len(prompt)])]
    kinds = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    other = Prompt(
        tuple(ph("q", part) if kind else pf(part) for part, kind in zip(parts, kinds, strict=True))
    )
    assert other.ids == prompt.ids
    assert other.sha256 == prompt.sha256


@given(PROMPTS, PROMPTS)
def test_other_ids_have_another_hash(first: Prompt, second: Prompt) -> None:
    assert (first.sha256 == second.sha256) == (first.ids == second.ids)


def test_the_hash_is_that_of_little_endian_64_bit_integers() -> None:
    ids = [1, 256, 128_009]
    assert ids_sha256(ids) == hashlib.sha256(struct.pack("<3q", *ids)).hexdigest()
    assert Prompt((pf(ids[:1]), ph("q", ids[1:]))).sha256 == ids_sha256(tuple(ids))


def test_the_order_of_ids_counts_and_boundaries_do_not_join_them() -> None:
    assert ids_sha256([1, 2]) != ids_sha256([2, 1])
    assert ids_sha256([1, 23]) != ids_sha256([12, 3])
    assert ids_sha256([1]) != ids_sha256([1, 0])
