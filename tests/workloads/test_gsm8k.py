import re

import pytest

from kvcmas.engine.workflow import Node
from workloads import get
from workloads.base import Message, Sample, Slot, Text
from workloads.gsm8k import GSM8K, describe
from workloads.gsm8k_prompts import CODER, PROMPTS
from workloads.sandbox import Execution, Isolation, Limits, Status

CODER_NODE = GSM8K().workflow["A2"]
SAMPLE = Sample("s", "How many?", "42")


def words(message: Message) -> str:
    return "".join(p.text if isinstance(p, Text) else f"<{p.name}>" for p in message.user)


def test_the_referee_reads_the_problem_all_outputs_and_the_program_result() -> None:
    workload = GSM8K()
    node = workload.workflow["A3"]
    filled = ["q", "out0", "out1", "out2", "obs2"]
    message = workload.message(node, filled)
    assert words(message) == (
        "Problem:\n<q>\n\nMath Solver wrote:\n<out0>\n\nMathematical Analyst wrote:\n<out1>\n\n"
        "Programming Expert wrote:\n<out2>\n\nThe program printed:\n<obs2>\n\nReply: The answer is"
    )
    assert message.system == PROMPTS["short"][3].system


@pytest.mark.parametrize("prompts", PROMPTS)
def test_each_agent_reads_what_the_workflow_says_and_never_two_slots_without_words_between(
    prompts: str,
) -> None:
    workload = get("gsm8k", prompts=prompts)
    systems = []
    for node in workload.workflow.nodes:
        filled = [s for s in workload.workflow.consumes(node) if s not in ("obs0", "obs1")]
        message = workload.message(node, filled)
        assert [p.name for p in message.user if isinstance(p, Slot)] == filled
        assert [type(p) for p in message.user] == [Text, Slot] * len(filled) + [Text]
        assert message.system == message.system.strip() != ""
        systems.append(message.system)
    assert len(set(systems)) == 4
    assert [len(workload.workflow.consumes(n)) for n in workload.workflow.nodes] == [1, 3, 5, 7]


@pytest.mark.parametrize("prompts", PROMPTS)
def test_the_words_that_are_asked_for_hold_no_placeholder_to_copy(prompts: str) -> None:
    for role in PROMPTS[prompts]:
        assert not re.search(r"\b[A-Z]\b", role.instruction), role.instruction


def test_an_empty_turn_leaves_no_heading() -> None:
    message = GSM8K().message(GSM8K().workflow["A2"], ["q", "out1"])
    assert "Math Solver wrote" not in words(message)
    assert "Mathematical Analyst wrote" in words(message)


def test_later_rounds_know_their_writers() -> None:
    workload = GSM8K(topology="loop", rounds=2)
    node = workload.workflow["A0@2"]
    assert "Programming Expert wrote:\n<out2>" in words(workload.message(node, ["q", "out2"]))
    node = workload.workflow["A1@2"]
    assert "Math Solver wrote:\n<out0@2>" in words(workload.message(node, ["q", "out0@2"]))


def test_the_program_is_run_and_its_result_observed() -> None:
    assert GSM8K().observe(CODER_NODE, "```python\nprint(6 * 7)\n```", SAMPLE) == "42"
    assert GSM8K().observe(CODER_NODE, "```python\nprint(6 * 7)\nprint(", SAMPLE) == (
        "nothing, it failed with SyntaxError"
    )
    assert GSM8K().observe(CODER_NODE, "```python\nx = 6\n```", SAMPLE) == "nothing"


def test_only_programs_of_the_programming_expert_are_run() -> None:
    assert CODER_NODE.agent == CODER
    assert GSM8K().observe(CODER_NODE, "The answer is 42.", SAMPLE) is None
    assert GSM8K().observe(Node(0), "```python\nprint(6 * 7)\n```", SAMPLE) is None


def test_an_observation_is_cut() -> None:
    workload = GSM8K(observation_chars=10)
    assert workload.observe(CODER_NODE, "```\nprint('ab' * 99)\n```", SAMPLE) == "ababababab"


def test_an_observation_is_the_same_in_every_run() -> None:
    program = (
        "```\nprint(lambda: 0, {'a', 'b', 'c'}, hash('x'))\n"
        "import random\nprint(random.random())\n```"
    )
    first, second = (GSM8K().observe(CODER_NODE, program, SAMPLE) for _ in range(2))
    assert first == second
    assert first is not None and "0x..." in first


def test_a_program_that_hangs_is_reported() -> None:
    workload = GSM8K(limits=Limits(wall_s=0.5))
    result = workload.observe(CODER_NODE, "```\nwhile True: pass\n```", SAMPLE)
    assert result == "nothing, it took too long"


@pytest.mark.parametrize("status", ["timeout", "killed", "output_limit", "error"])
def test_every_failure_has_words_without_a_number(status: Status) -> None:
    told = describe(Execution("5", "", status, 0.1, Isolation(False, False)))
    assert told and not any(c.isdigit() for c in told)


def test_the_answer_is_the_referees_last_number() -> None:
    sample = Sample("s", "q", "1200")
    assert GSM8K().score(sample, "3 * 400 = 1200. The answer is $1,200.").correct
    assert not GSM8K().score(sample, "The answer is 1200, or 3").correct
    assert GSM8K().score(sample, "I do not know").failure == "no number in the answer"


def test_procedural_data_say_what_they_are() -> None:
    dataset = GSM8K(difficulty=2, problems=7).load("procedural", split="calibration", seed=3)
    assert (dataset.source, len(dataset.samples)) == ("procedural", 7)
    assert dataset.label == "procedural (difficulty 2, not GSM8K)"
    assert all("calibration" in s.id for s in dataset.samples)
