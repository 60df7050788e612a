import json
import math
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from workloads import get
from workloads.base import Choosing, Sample, Slot, Text
from workloads.letters import NO_LETTER
from workloads.mmlu import MMLU, chosen_rows
from workloads.mmlu_prompts import EXPERT, PROMPTS

ROW = {"question": " One? ", "subject": "sums", "choices": ["1", "None", "3", "4"], "answer": 1}
SAMPLE = Sample("s", "Capital of France?\nA. Rome\nB. Paris", "B", {"subject": "geography"})


def write(folder: Path, *rows: object, name: str = "validation.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_becomes_a_question_with_its_options(tmp_path: Path) -> None:
    write(tmp_path, ROW, ROW | {"answer": 3})
    dataset = MMLU(questions="validation").load(tmp_path)
    first, second = dataset.samples
    assert first.question == "One?\nA. 1\nB. None\nC. 3\nD. 4"
    assert (first.id, first.answer, second.answer) == ("mmlu-validation-0000", "B", "D")
    assert first.meta == {"subject": "sums"}
    assert (dataset.source, dataset.label) == ("local", "validation.jsonl validation")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"choices": ["1", "2", "3"]}, "must be a list of 4 texts"),
        ({"choices": [1, 2, 3, 4]}, "must be a list of 4 texts"),
        ({"choices": "1234"}, "must be a list of 4 texts"),
        ({"answer": 4}, "the index of a choice"),
        ({"answer": "B"}, "the index of a choice"),
        ({"answer": True}, "the index of a choice"),
        ({"question": ""}, "the field 'question'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    write(tmp_path, ROW, ROW | change)
    with pytest.raises(UserError, match=rf"validation\.jsonl:2: .*{complaint}"):
        MMLU(questions="validation").load(tmp_path)


def test_kvcomms_questions_are_those_of_its_permutation(shared: Path) -> None:
    listed = json.loads((shared / "data/mmlu/kvcomm_val153_ids.json").read_text())
    assert chosen_rows() == listed["row_ids_in_validation_jsonl"]
    dataset = MMLU().load(shared / "data")
    assert len(dataset.samples) == 153 == len({s.id for s in dataset.samples})
    assert dataset.samples[0].id == f"mmlu-validation-{chosen_rows()[0]:04d}"


def test_whole_splits_and_calibration_load(shared: Path) -> None:
    validation = MMLU(questions="validation").load(shared / "data/mmlu").samples
    dev = MMLU().load(shared / "data/mmlu", split="calibration").samples
    assert (len(validation), len(dev)) == (1531, 285)
    # MMLU repeats a few questions; who calibrates has to leave those out.
    assert 0 < len({s.question for s in validation} & {s.question for s in dev}) < 10
    # The files go subject by subject; the first samples do not.
    assert len({s.meta["subject"] for s in dev[:20]}) > 12
    assert len({s.meta["subject"] for s in validation[:60]}) > 25
    assert dev == MMLU().load(shared / "data/mmlu", split="calibration").samples
    by_id = {s.id: s for s in validation}
    chosen = [by_id[f"mmlu-validation-{row:04d}"] for row in chosen_rows()]
    assert chosen == list(MMLU().load(shared / "data").samples)
    with pytest.raises(UserError, match=r"has no test\.jsonl"):
        MMLU(questions="test").load(shared / "data/mmlu")


def test_kvcomms_questions_are_not_chosen_from_other_rows(tmp_path: Path) -> None:
    write(tmp_path, ROW)
    with pytest.raises(UserError, match="set questions=validation"):
        MMLU().load(tmp_path)
    write(tmp_path, *(ROW | {"subject": f"{-i}"} for i in range(1531)))
    with pytest.raises(UserError, match="in another order"):
        MMLU().load(tmp_path)


def test_procedural_questions_say_what_they_are() -> None:
    dataset = MMLU(problems=7).load("procedural", split="calibration", seed=3)
    assert (dataset.source, len(dataset.samples)) == ("procedural", 7)
    assert dataset.label == "procedural questions (not MMLU)"


def test_the_searcher_reads_question_expert_and_passages() -> None:
    message = MMLU().message(MMLU().workflow["A1"], ["q", "out0", "obs0"])
    words = "".join(p.text if isinstance(p, Text) else f"<{p.name}>" for p in message.user)
    assert words == (
        "Question:\n<q>\n\nKnowledgeable Expert wrote:\n<out0>\n\nPassages found:\n<obs0>"
        "\n\nSay in one sentence what is known about this."
    )


@pytest.mark.parametrize("prompts", PROMPTS)
def test_agents_have_words_of_their_own(prompts: str) -> None:
    workload = MMLU(prompts=prompts)
    assert workload.agents == ("Knowledgeable Expert", "Wiki Searcher", "Critic", "FinalRefer")
    messages = [workload.message(n, workload.workflow.consumes(n)) for n in workload.workflow.nodes]
    assert len({m.system for m in messages}) == 4
    for message in messages:
        assert [type(p) for p in message.user] == [Text, Slot] * (len(message.user) // 2) + [Text]


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    rows = [("Paris", "Paris is the capital of France."), ("Rome", "Rome is old.")]
    path.write_text("".join(json.dumps({"title": a, "text": b}) + "\n" for a, b in rows))
    return path


def test_passages_for_the_experts_terms_are_observed(passages: Path) -> None:
    workload = MMLU(retrieval=str(passages))
    expert, searcher = workload.workflow["A0"], workload.workflow["A1"]
    assert expert.agent == EXPERT
    assert workload.observe(expert, "Search: Rome", SAMPLE) == "Rome: Rome is old."
    both = workload.observe(expert, "Search: Paris; Rome", SAMPLE)
    assert both == "Paris: Paris is the capital of France.\n\nRome: Rome is old."
    # Without terms the question is looked up, without its options.
    assert workload.observe(expert, "Hm.", SAMPLE) == "Paris: Paris is the capital of France."
    assert workload.observe(expert, "Search: volcano", SAMPLE) is None
    assert workload.observe(searcher, "Search: Rome", SAMPLE) is None
    assert MMLU().observe(expert, "Search: Rome", SAMPLE) is None
    cut = MMLU(retrieval=str(passages), observation_chars=4, passages=1)
    assert cut.observe(expert, "Search: Rome", SAMPLE) == "Rome"


def test_the_passages_are_part_of_the_datas_hash(tmp_path: Path, passages: Path) -> None:
    write(tmp_path, ROW)

    def sha256(retrieval: str) -> str:
        return MMLU(questions="validation", retrieval=retrieval).load(tmp_path).sha256

    before = sha256(str(passages))
    assert before != sha256("none")
    passages.write_text(json.dumps({"title": "Paris", "text": "Changed."}) + "\n")
    assert sha256(str(passages)) != before


def test_both_scorings_are_recorded_and_one_decides() -> None:
    nats = [-3.0, -1.0, -2.0, -9.0]
    by_text = MMLU(scoring="text").choose(SAMPLE, "The answer is C.", nats)
    assert (by_text.correct, by_text.extracted, by_text.failure) == (False, "C", None)
    by_likelihood = MMLU(scoring="likelihood").choose(SAMPLE, "The answer is C.", nats)
    assert (by_likelihood.correct, by_likelihood.extracted) == (True, "B")
    assert by_text.notes == by_likelihood.notes
    likelihood = by_text.notes["likelihood"]
    assert likelihood["nats"] == dict(zip("ABCD", nats, strict=True))
    total = sum(math.exp(n) for n in nats)
    expected = {letter: math.exp(n) / total for letter, n in zip("ABCD", nats, strict=True)}
    assert likelihood["shares"] == pytest.approx(expected)
    assert by_text.notes["text"] == {"extracted": "C", "correct": False}


def test_a_text_without_a_letter_fails_only_where_the_text_decides() -> None:
    nats = [0.0, 0.0, -1.0, -1.0]
    assert MMLU(scoring="text").choose(SAMPLE, "Paris", nats).failure == NO_LETTER
    tie = MMLU(scoring="likelihood").choose(SAMPLE, "Paris", nats)
    assert (tie.failure, tie.extracted) == (None, "A")
    assert isinstance(MMLU(), Choosing)
    assert not isinstance(get("gsm8k"), Choosing)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"questions": "all"}, "questions is one of kvcomm153, validation, test, not 'all'"),
        ({"scoring": "letters"}, "scoring is one of text, likelihood"),
        ({"prompts": "long"}, "prompts is one of short, steps"),
        ({"passages": 0}, "start at 1"),
        ({"rounds": 2}, "use loop"),
        ({"retrieval": "nowhere.jsonl"}, "cannot read passages from nowhere.jsonl"),
    ],
)
def test_bad_settings_are_refused_in_one_line(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        get("mmlu", **options)


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(UserError, match="not 'dev'"):
        MMLU().load("procedural", split="dev")
