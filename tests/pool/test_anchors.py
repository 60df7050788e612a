import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcmas.engine.contract import Edge, State
from kvcmas.pool.anchors import AnchorPool, CapacityRule, edge_key

EDGE = edge_key(Edge("q", "A0", "A1"))
LATER = edge_key(Edge("q", "A1", "A2"))


@dataclass(frozen=True)
class Part:
    x: Tensor

    @property
    def nbytes(self) -> int:
        return self.x.nbytes

    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x}


def part(value: float = 0.0) -> Part:
    return Part(torch.full((4,), value))


def restore(tensors: dict[str, Tensor]) -> Part:
    return Part(tensors["x"])


def insert(
    pool: AnchorPool[Part], *requests: str, slot: str = "q", edge: str = EDGE, length: int = 5
) -> None:
    for request in requests:
        pool.insert(slot, request, length, {edge: part()}, exact=True)


def held(pool: AnchorPool[Part], slot: str = "q") -> list[str]:
    return [anchor.request for s, anchor in pool if s == slot]


@pytest.mark.parametrize(("rule", "most"), [("strict", 3), ("authors", 4)])
def test_capacity(rule: CapacityRule, most: int) -> None:
    pool = AnchorPool[Part](3, rule=rule)
    insert(pool, *"abcdefg")
    assert len(pool) == most


def test_slots_have_their_own_capacity() -> None:
    pool = AnchorPool[Part](2)
    insert(pool, *"abc", slot="q")
    insert(pool, *"abc", slot="out0")
    assert held(pool, "q") == held(pool, "out0") == ["b", "c"]


def test_ties_evict_the_oldest() -> None:
    pool = AnchorPool[Part](3)
    insert(pool, *"abcd")
    assert held(pool) == ["b", "c", "d"]


def test_least_used_of_the_oldest_goes_first() -> None:
    pool = AnchorPool[Part](3)
    insert(pool, *"abc")
    pool.use("q", ["a", "a", "b", "c"])
    insert(pool, "d")
    assert held(pool) == ["a", "c", "d"]
    insert(pool, "e")
    assert held(pool) == ["a", "c", "e"]


def test_only_the_window_competes() -> None:
    pool = AnchorPool[Part](4, window=2)
    insert(pool, *"abcd")
    pool.use("q", ["a", "b", "b"])
    insert(pool, "e")
    assert held(pool) == ["b", "c", "d", "e"]


def test_use_skips_what_was_evicted() -> None:
    pool = AnchorPool[Part](2)
    insert(pool, *"abc")
    pool.use("q", ["a", "b"])
    pool.use("nowhere", ["a"])
    assert [anchor.uses for _, anchor in pool] == [1, 0]


def test_another_edge_extends_the_anchor() -> None:
    pool = AnchorPool[Part](2)
    insert(pool, *"ab")
    insert(pool, "a", edge=LATER)
    assert held(pool) == ["a", "b"]
    assert [a.request for a in pool.compatible("q", LATER)] == ["a"]
    assert [a.request for a in pool.compatible("q", EDGE)] == ["a", "b"]
    assert pool.compatible("out0", EDGE) == []


def test_an_anchor_remembers_whether_each_edge_was_exact() -> None:
    pool = AnchorPool[Part](2)
    pool.insert("q", "a", 5, {EDGE: part()}, exact=True)
    pool.insert("q", "a", 5, {LATER: part()}, exact=False)
    anchor = pool.anchor("q", "a")
    assert anchor is not None
    assert anchor.exact == {EDGE: True, LATER: False}


def test_a_request_has_one_length() -> None:
    pool = AnchorPool[Part](2)
    insert(pool, "a", length=5)
    with pytest.raises(ValueError, match="has 5 tokens, not 6"):
        insert(pool, "a", edge=LATER, length=6)


def test_bytes() -> None:
    pool = AnchorPool[Part](2)
    insert(pool, *"abc")
    insert(pool, "c", edge=LATER)
    assert pool.nbytes == 3 * part().nbytes
    assert pool.state().nbytes == pool.nbytes


def through_json(state: State) -> State:
    return State(json.loads(json.dumps(state.meta)), state.entries)


def test_a_restored_pool_continues_like_the_original() -> None:
    pool = AnchorPool[Part](3)
    insert(pool, *"abc")
    insert(pool, "b", edge=LATER)
    pool.use("q", ["a", "c"])
    copy = AnchorPool[Part](3)
    copy.load_state(through_json(pool.state()), restore)
    for each in (pool, copy):
        insert(each, "d")
        each.use("q", ["d"])
        insert(each, *"ef")
    assert copy.state().meta == pool.state().meta
    assert held(copy) == ["c", "d", "f"]


def test_entries_are_never_rewritten_under_the_same_name() -> None:
    pool, seen = AnchorPool[Part](2), dict[str, Tensor]()
    for n, request in enumerate("abacbd"):
        pool.insert("q", request, 5, {EDGE: part(n)}, exact=True)
        for name, entry in pool.state().entries.items():
            torch.testing.assert_close(seen.setdefault(name, entry["x"]), entry["x"])
    assert len(seen) == 6
