import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from workloads import get
from workloads.base import Sample, Slot, Text
from workloads.humaneval import HumanEval
from workloads.humaneval_prompts import CODER, PROMPTS
from workloads.humaneval_run import docstring_examples
from workloads.sandbox import Limits, run_python
from workloads.solutions import NO_CODE

PROMPT = '''def area(a: int, b: int) -> int:
    """ The area of a rectangle.
    >>> area(2, 3)
    6
    >>> area(0, 3)
    0
    """
'''
ROW = {
    "task_id": "Some/0",
    "prompt": PROMPT,
    "canonical_solution": "    return a * b\n",
    "test": "def check(candidate):\n    assert candidate(4, 5) == 20, 'sesame'\n",
    "entry_point": "area",
}
QUICK = Limits(wall_s=20, cpu_s=1)


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(ROW) + "\n")
    return HumanEval().load(tmp_path).samples[0]


def answer(body: str) -> str:
    return f"```python\ndef area(a, b):\n{body}\n```"


def observed(sample: Sample, text: str, limits: Limits = QUICK) -> str | None:
    workload = HumanEval(limits=limits)
    return workload.observe(workload.workflow[f"A{CODER}"], text, sample)


def test_a_row_becomes_a_sample_and_the_checks_its_answer(sample: Sample) -> None:
    assert (sample.id, sample.question) == ("Some/0", PROMPT)
    assert sample.answer == f"{ROW['test'].strip()}\n\ncheck(area)"
    assert sample.meta == {"entry_point": "area"}


def test_the_right_function_passes_and_a_wrong_one_does_not(sample: Sample) -> None:
    right = HumanEval().score(sample, answer("    return a * b"))
    assert (right.correct, right.extracted, right.failure) == (True, "passed", None)
    wrong = HumanEval().score(sample, answer("    return a + b"))
    assert (wrong.correct, wrong.extracted) == (False, "AssertionError")
    assert wrong.notes["solution"].endswith("return a + b")
    none = HumanEval().score(sample, "I would rather not.")
    assert (none.correct, none.extracted, none.failure) == (False, None, NO_CODE)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return 20\nimport sys\nsys.exit(0)", "ended before its checks"),
        ("    return 20\nimport os\nos._exit(0)", "ended before its checks"),
        ("    return 20\nraise SystemExit", "ended before its checks"),
        ("    return nothing", "NameError"),
        ("    return area(a, b)", "RecursionError"),
        ("    while True: pass\n    return 0", "it used too much time or memory"),
        ("    return bytearray(10 ** 10)", "MemoryError"),
        ("    while True: print('x' * 10 ** 6)\n    return 0", "it printed too much"),
        (
            "    import os\n    os.abort()\n    return 0",
            "it used too much time or memory",
        ),
    ],
)
def test_a_solution_that_does_not_pass_says_why(sample: Sample, body: str, reason: str) -> None:
    score = HumanEval(limits=QUICK).score(sample, answer(body))
    assert (score.correct, score.extracted) == (False, reason)


def test_a_main_block_is_not_run_as_in_the_official_harness(sample: Sample) -> None:
    body = "    return a * b\n\nif __name__ == '__main__':\n    raise ValueError"
    assert HumanEval().score(sample, answer(body)).correct


def test_the_examples_are_run_and_what_they_gave_is_told(sample: Sample) -> None:
    assert observed(sample, answer("    return a * b")) == "2 of 2 examples passed."
    assert observed(sample, answer("    return a + b")) == (
        "0 of 2 examples passed.\narea(2, 3) gave 5, not 6\narea(0, 3) gave 3, not 0"
    )
    assert observed(sample, answer("    return 6 // a")) == (
        "0 of 2 examples passed.\narea(2, 3) gave 3, not 6\n"
        "area(0, 3) gave raised ZeroDivisionError, not 0"
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("    return 1\n1 / 0", "The code does not run: ZeroDivisionError."),
        ("    return 1\nwhile True: pass", "The code does not run: it used too much time or mem"),
        ("    return 1\nimport os\nos._exit(0)", "The code ends the program."),
        ("    print(1)\n    return print", "0 of 2 examples passed.\narea(2, 3) gave 1 <built-in"),
    ],
)
def test_code_that_does_not_run_is_told_of(sample: Sample, body: str, told: str) -> None:
    assert (observed(sample, answer(body)) or "").startswith(told)


def test_values_are_compared_and_not_their_quotes() -> None:
    prompt = 'def f():\n    """\n    >>> f()\n    "x"\n    """\n'
    other = Sample("s", prompt, "", {"entry_point": "f"})
    assert observed(other, "```\ndef f():\n    return 'x'\n```") == "1 of 1 examples passed."


def test_a_docstring_without_examples_is_said_to_have_none() -> None:
    other = Sample("s", 'def f():\n    """ It. """\n', "", {"entry_point": "f"})
    assert observed(other, "```\ndef f():\n    return 1\n```") == (
        "The code runs; the docstring has no examples to try."
    )


def test_a_body_that_goes_on_from_a_brief_reply_is_a_solution(sample: Sample) -> None:
    workload = HumanEval(prompts="brief")
    node = workload.workflow[f"A{CODER}"]
    message = workload.message(node, workload.workflow.consumes(node))
    for body in (" return a * b\n```\nThat is all.", " c = a * b\n    return c\n    # cut"):
        text = message.reply + body
        assert workload.score(sample, text).correct
        assert workload.observe(node, text, sample) == "2 of 2 examples passed."
    referee = workload.workflow["A3"]
    told = workload.message(referee, workload.workflow.consumes(referee)).user
    before = told[told.index(Slot("out2")) - 1]
    assert before == Text(f"\n\nProgramming Expert wrote:\n{message.reply}")


def test_only_code_of_the_programming_expert_is_run(sample: Sample) -> None:
    workload = HumanEval()
    assert {roles[CODER].name for roles in PROMPTS.values()} == {"Programming Expert"}
    for node in workload.workflow.nodes:
        if node.agent != CODER:
            assert workload.observe(node, answer("    return a * b"), sample) is None
    assert observed(sample, "Multiply both.") is None


def test_observations_are_cut(sample: Sample) -> None:
    workload = HumanEval(observation_chars=10)
    assert workload.observe(workload.workflow["A2"], answer("    return 1"), sample) == "0 of 2 exa"


def test_the_official_checks_never_reach_a_prompt(shared: Path) -> None:
    """Query and observation of all problems, against every line of their checks."""
    samples = HumanEval().load(shared / "data").samples
    assert len(samples) == 164
    for sample in samples:
        assert "check(candidate" not in sample.question and "METADATA" not in sample.question
        for line in sample.answer.splitlines():
            assert "assert" not in line or line.strip() not in sample.question

    def told(sample: Sample) -> str:
        text = f"```python\ndef {sample.meta['entry_point']}(*x):\n    return x\n```"
        return observed(sample, text) or ""

    with ThreadPoolExecutor(2) as pool:
        observations = list(pool.map(told, samples[::8]))
    for sample, observation in zip(samples[::8], observations, strict=True):
        examples = docstring_examples(sample.question, sample.meta["entry_point"])
        known = {example.source.strip() for example in examples}
        for line in observation.splitlines()[1:]:
            assert line.partition(" gave ")[0] in known


@pytest.mark.parametrize("prompts", PROMPTS)
def test_the_gold_answer_is_not_among_what_a_message_is_made_of(
    sample: Sample, prompts: str
) -> None:
    workload = HumanEval(prompts=prompts)
    for node in workload.workflow.nodes:
        filled = workload.workflow.consumes(node)
        message = workload.message(node, filled)
        assert [piece.name for piece in message.user if isinstance(piece, Slot)] == list(filled)
        assert "sesame" not in repr(message)
    assert "sesame" not in (observed(sample, answer("    return 1")) or "")


def test_reference_solutions_pass_and_empty_ones_do_not(shared: Path) -> None:
    path = shared / "data/humaneval/HumanEval.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines[::8]]
    samples = HumanEval().load(path).samples[::8]

    def both(pair: tuple[dict[str, str], Sample]) -> tuple[bool, bool]:
        row, sample = pair
        right = HumanEval().score(sample, row["canonical_solution"])
        empty = HumanEval().score(sample, f"```python\n{row['prompt']}    return None\n```")
        return right.correct, empty.correct

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(both, zip(rows, samples, strict=True)))
    assert set(found) == {(True, False)}


@pytest.mark.parametrize(
    ("options", "data", "split", "complaint"),
    [
        ({"observation_chars": 0}, "hub", "test", "observation_chars starts at 1"),
        ({"topology": "ring"}, "hub", "test", "unknown topology 'ring'"),
        ({"prompts": "long"}, "hub", "test", "prompts are steps, brief, not 'long'"),
        ({}, "procedural", "test", "--data package"),
        ({}, "hub", "calibration", "the split test only"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    options: dict[str, object], data: str, split: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        get("humaneval", **options).load(data, split=split, seed=0)


def test_the_sandbox_has_what_the_reference_solutions_import() -> None:
    assert (
        run_python("import math, hashlib, re, collections, typing, string, random").status == "ok"
    )
