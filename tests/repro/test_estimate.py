"""The estimate of `--dry-run`: tokens counted exactly, rates measured, time from both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from repro.runners.estimate import Speed, Tokens, measure, trajectory_tokens
from workloads import get
from workloads.base import Sample
from workloads.chat import ChatFormat

if TYPE_CHECKING:
    from conftest import Loaded


def test_tokens_are_those_of_prompts_whose_outputs_run_to_the_limit(tiny_llama: Loaded) -> None:
    chat, workload = ChatFormat.from_tokenizer(tiny_llama[1]), get("gsm8k")
    samples = (Sample("s", "How many apples are left?", "3"),)
    found = trajectory_tokens(workload, chat, samples, 10, 4)
    assert found.decoded == 3 * 10 + 4

    fills = {"q": chat.encode_shared(samples[0].question)}
    expected = 0
    for node in workload.workflow.nodes:
        filled = [slot for slot in workload.workflow.consumes(node) if slot in fills]
        expected += len(chat.segments(workload.message(node, filled), fills))
        fills[node.out_slot] = (1,) * 10
    assert found.prefilled == expected
    longer = trajectory_tokens(workload, chat, samples, 20, 4)
    # Each output is read by all later agents: 3 + 2 + 1 times ten more tokens.
    assert longer.prefilled == found.prefilled + 60


def test_time_grows_with_tokens_and_weights() -> None:
    speed = Speed(flops=1e9, bytes=1e9)
    prefill = speed.seconds(Tokens(100, 0), parameters=1e6, weight_bytes=4e6)
    assert prefill == pytest.approx(0.2)
    decode = speed.seconds(Tokens(0, 10), parameters=1e6, weight_bytes=4e6)
    assert 0.04 <= decode < 0.08
    both = speed.seconds(Tokens(100, 10).times(3), parameters=1e6, weight_bytes=4e6)
    assert both == pytest.approx(3 * (prefill + decode))


def test_the_machine_is_measured() -> None:
    speed = measure(torch.float32, "cpu", seconds=0.01)
    assert speed.flops > 0 and speed.bytes > 0
