from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.engine.workflow import (
    QUERY,
    TOPOLOGIES,
    Node,
    Workflow,
    build,
    fan_in,
    fan_out,
    fully_connected,
    loop,
    sequential,
)

WORKFLOWS = st.one_of(
    st.builds(build, st.sampled_from(sorted(TOPOLOGIES)), st.integers(1, 6)),
    st.builds(loop, st.integers(1, 4), st.integers(1, 4)),
)


def parents(workflow: Workflow) -> dict[str, Sequence[str]]:
    return {node.name: node.parents for node in workflow.nodes}


def transitions(workflow: Workflow, slot: str) -> list[tuple[str, str]]:
    """Source and target of a slot's reuse: consumer to consumer, an output's producer first."""
    holders = [node.name for node in workflow.nodes if node.out_slot == slot]
    return list(pairwise([*holders, *workflow.consumers(slot)]))


def test_names_carry_the_round_beyond_the_first() -> None:
    first, second = Node(2), Node(2, 2)
    assert (first.name, first.out_slot, first.obs_slot) == ("A2", "out2", "obs2")
    assert (second.name, second.out_slot, second.obs_slot) == ("A2@2", "out2@2", "obs2@2")


def test_sequential() -> None:
    workflow = sequential(3)
    assert parents(workflow) == {"A0": (), "A1": ("A0",), "A2": ("A1",)}
    assert workflow.consumes(workflow["A2"]) == ("q", "out1", "obs1")
    assert workflow.consumers(QUERY) == ("A0", "A1", "A2")
    assert workflow.consumers("out0") == ("A1",)


def test_fully_connected_has_the_papers_edges() -> None:
    """Three task agents and FinalRefer: the query moves three times, outputs six times."""
    workflow = fully_connected(4)
    assert parents(workflow)["A3"] == ("A0", "A1", "A2")
    assert workflow.consumes(workflow["A2"]) == ("q", "out0", "obs0", "out1", "obs1")
    assert transitions(workflow, QUERY) == [("A0", "A1"), ("A1", "A2"), ("A2", "A3")]
    assert transitions(workflow, "out1") == [("A1", "A2"), ("A2", "A3")]
    assert sum(len(transitions(workflow, f"out{a}")) for a in range(4)) == 6


def test_a_loop_reads_its_own_round_and_all_of_the_one_before() -> None:
    workflow = loop(2, 3)
    assert parents(workflow) == {
        "A0": (),
        "A1": ("A0",),
        "A0@2": ("A0", "A1"),
        "A1@2": ("A0", "A1", "A0@2"),
        "A0@3": ("A0@2", "A1@2"),
        "A1@3": ("A0@2", "A1@2", "A0@3"),
    }
    assert workflow.consumers("out0") == ("A1", "A0@2", "A1@2")
    assert workflow.consumers("out0@2") == ("A1@2", "A0@3", "A1@3")
    assert workflow.agents == 2


def test_fan_in() -> None:
    workflow = fan_in(4)
    assert parents(workflow) == {"A0": (), "A1": (), "A2": (), "A3": ("A0", "A1", "A2")}
    assert workflow.consumers("out1") == ("A3",)


def test_fan_out() -> None:
    workflow = fan_out(4)
    assert parents(workflow) == {"A0": (), "A1": ("A0",), "A2": ("A0",), "A3": ("A0",)}
    assert workflow.consumers("out0") == ("A1", "A2", "A3")
    assert workflow.consumers("out1") == ()


@given(WORKFLOWS)
def test_every_workflow_is_in_topological_order(workflow: Workflow) -> None:
    order = {node.name: i for i, node in enumerate(workflow.nodes)}
    assert len(order) == len(workflow.nodes)
    for node in workflow.nodes:
        assert workflow[node.name] is node
        assert all(order[parent] < order[node.name] for parent in node.parents)
        outputs = [workflow[parent].out_slot for parent in node.parents]
        observations = [workflow[parent].obs_slot for parent in node.parents]
        assert workflow.consumes(node) == (
            QUERY,
            *(slot for pair in zip(outputs, observations, strict=True) for slot in pair),
        )


@given(WORKFLOWS)
def test_consumers_are_in_static_order_and_come_after_the_producer(workflow: Workflow) -> None:
    order = [node.name for node in workflow.nodes]
    assert workflow.consumers(QUERY) == tuple(order)
    for node in workflow.nodes:
        consumers = workflow.consumers(node.out_slot)
        assert consumers == workflow.consumers(node.obs_slot)
        places = [order.index(name) for name in (node.name, *consumers)]
        assert places == sorted(set(places))


@given(WORKFLOWS)
def test_agents_and_slots_are_counted_once(workflow: Workflow) -> None:
    assert workflow.agents == len({node.agent for node in workflow.nodes})
    slots = [slot for node in workflow.nodes for slot in (node.out_slot, node.obs_slot)]
    assert len(slots) == len(set(slots))


def test_build_makes_every_topology() -> None:
    for name in TOPOLOGIES:
        assert build(name, 3).name == name
    assert build("loop", 2, 2) == loop(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 3), "unknown topology 'ring'; known: sequential, fully_connected, loop"),
        (("sequential", 0), "start at 1"),
        (("loop", 3, 0), "start at 1"),
        (("fan_in", 3, 2), "one round"),
    ],
)
def test_build_refuses(arguments: tuple[str, int] | tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "at least one turn"),
        ((Node(0), Node(0)), "two turns are called A0"),
        ((Node(0, 1, ("A1",)), Node(1)), "A0 reads A1"),
        ((Node(0, 1, ("A0",)),), "A0 reads A0"),
    ],
)
def test_a_workflow_refuses(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workflow("own", nodes)


def test_an_unknown_turn_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="A7"):
        sequential(2)["A7"]
