"""The example in examples/serving, against a `vllm serve` started as docs/serving.md says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parent.parent.parent
STARTS_WITHIN = 900


def example() -> ModuleType:
    path = ROOT / "examples" / "serving" / "three_agents.py"
    spec = importlib.util.spec_from_file_location("three_agents", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def documented_command(model: Path, port: int) -> list[str]:
    """The command line of the page, with a model, a port and sizes for this machine."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```\n(vllm serve .*?)```", page, flags=re.DOTALL)
    program, serve, name, *options = shlex.split(text.replace("\\\n", " "))
    assert (program, serve, name) == ("vllm", "serve", "MODEL")
    sizes = {"--port": port, "--dtype": "float32", "--max-model-len": 2048}
    sizes |= {"--kv-cache-memory-bytes": 1 << 27, "--host": "127.0.0.1"}
    # The CPU wheel's own command looks for a distribution of another name; this is what it runs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return command + options + [str(part) for item in sizes.items() for part in item]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of the tiny model; the processes of vLLM's usual set-up, not one as elsewhere."""
    from repro.models import resolve

    model = resolve("tiny-llama").path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(documented_command(model, port), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + STARTS_WITHIN
        while not healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1", model
    finally:
        process.terminate()
        process.wait(timeout=60)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_three_agents_share_what_they_read(server: tuple[str, Path]) -> None:
    from openai import OpenAI
    from transformers import AutoTokenizer

    url, model = server
    module, client = example(), OpenAI(base_url=url, api_key="none")
    tokenizer = AutoTokenizer.from_pretrained(model)
    question = "How many minutes are there in three days?"
    for _ in range(2):
        answers = module.ask(client, str(model), tokenizer, question, max_tokens=24)
        assert [answer.agent for answer in answers] == ["A0", "A1", "A2"]
        first, *later = answers
        assert first.external_rows == 0
        assert all(answer.external_rows > len(question) for answer in later)


def test_a_request_that_makes_no_sense_is_told_so(server: tuple[str, Path]) -> None:
    from openai import OpenAI

    url, model = server
    response = OpenAI(base_url=url, api_key="none").completions.create(
        model=str(model),
        prompt=[5, 6, 7],
        max_tokens=2,
        extra_body={"kv_transfer_params": {"kvcmas": {"request": "r"}}},
    )
    assert "Field required" in response.kv_transfer_params["kvcmas"]["fallback"]  # type: ignore[attr-defined]
