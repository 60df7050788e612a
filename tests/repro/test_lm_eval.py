"""The workflow as a model of lm-eval: registry, generation, likelihoods, offline tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvcmas.errors import UserError

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from repro.commands.lm_eval_run import TASKS, Request, run
from repro.lm_eval.agents import ROLES, AnyTask
from repro.lm_eval.model import WorkflowLM
from workloads.base import Sample


@pytest.fixture(scope="module")
def model(tiny_llama: tuple) -> WorkflowLM:
    made = get_model("kvcmas-workflow").create_from_arg_string(
        "pretrained=tiny-llama,method=kvcmas,tau=1.0,max_new_tokens=4", {"batch_size": 1}
    )
    assert isinstance(made, WorkflowLM)
    return made


def instance(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def test_generation_is_the_last_agents_text_cut_at_stop_strings(model: WorkflowLM) -> None:
    options = {"until": [], "max_gen_toks": 12, "do_sample": False}
    (whole,) = model.generate_until([instance("generate_until", "One?", options)])
    assert len(whole) > 2
    stop = whole[len(whole) // 2]
    (cut,) = model.generate_until(
        [instance("generate_until", "One?", options | {"until": ["\x00", stop]})]
    )
    assert whole.startswith(cut) and stop not in cut


def test_sampling_is_refused(model: WorkflowLM) -> None:
    options = {"until": ["."], "do_sample": True, "temperature": 0.7}
    with pytest.raises(UserError, match="decodes greedily"):
        model.generate_until([instance("generate_until", "One?", options)])


def test_likelihoods_come_back_in_order_and_contexts_run_once(model: WorkflowLM) -> None:
    before = model._requests
    pairs = [("One?", " A"), ("Two?", " A"), ("One?", " B"), ("One?", "A"), ("Two?", " long one")]
    found = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs])
    assert model._requests == before + 2
    assert all(nats < 0 and isinstance(greedy, bool) for nats, greedy in found)
    assert found[0] == found[3]  # white space before a reply does not count
    assert found[0] != found[1] and found[0] != found[2]
    assert model.rho is not None and 0 < model.rho <= 1  # the pool has two anchors by now


def test_the_device_that_lm_eval_offers_by_default_may_be_missing(tiny_llama: tuple) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    made = WorkflowLM(pretrained="tiny-llama", method="nonshared", device="cuda:0")
    assert made.rho is None


def test_perplexity_is_refused(model: WorkflowLM) -> None:
    with pytest.raises(UserError, match="no question for agents"):
        model.loglikelihood_rolling([])


@pytest.mark.parametrize("task", ["kvcmas_gsm8k", "kvcmas_mmlu"])
def test_offline_tasks_run_through_lm_evals_evaluator(model: WorkflowLM, task: str) -> None:
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={"data": "procedural"}
    )
    evaluated = simple_evaluate(
        model=model, tasks=[task], task_manager=manager, limit=1, bootstrap_iters=0
    )
    assert evaluated is not None
    assert evaluated["results"][task]["acc,none"] in (0.0, 1.0)
    (sample,) = evaluated["samples"][task]
    assert sample["doc"]["id"].startswith(("procedural", "quiz"))


def test_humaneval_is_scored_by_its_checks(tmp_path: Path) -> None:
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={"data": str(tmp_path)}
    )
    row = {
        "task_id": "Some/0",
        "prompt": 'def area(a, b):\n    """ It. """\n',
        "test": "def check(candidate):\n    assert candidate(4, 5) == 20",
        "entry_point": "area",
    }
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row) + "\n")
    loaded = manager.load(["kvcmas_humaneval"])["tasks"]["kvcmas_humaneval"]
    (doc,) = loaded.test_docs()
    assert loaded.process_results(doc, ["    return a * b"]) == {"acc": 1.0}
    assert loaded.process_results(doc, ["    return a + b"]) == {"acc": 0.0}


def test_agents_for_any_task_share_the_task_and_hand_the_text_on() -> None:
    workload = AnyTask()
    assert workload.agents == tuple(role.name for role in ROLES)
    node = workload.workflow["A3"]
    message = workload.message(node, ["q", "out0"])
    assert message.user[0].text == "Task:\n"  # type: ignore[union-attr]
    assert workload.observe(node, "x", Sample("s", "q", "")) is None
    with pytest.raises(UserError, match="come from lm-eval"):
        workload.load("hub", split="test", seed=0)
    with pytest.raises(UserError, match="unknown topology"):
        AnyTask(topology="ring")


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (Request(tasks="kvcmas_gsm8q"), "no task 'kvcmas_gsm8q'"),
        (Request(tasks=" , "), "no task was named"),
        (Request(tasks="kvcmas_gsm8k", method="kvcmass"), "kvcmas"),
        (Request(tasks="kvcmas_gsm8k", agents="gsm8q", model="tiny-llama"), "gsm8k"),
        (Request(tasks="kvcmas_gsm8k", set=("taw=1",)), "taw"),
    ],
)
def test_bad_requests_get_one_line(request_: Request, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        run(request_)
