"""The registry, directories, tiny models, loading and the command line of repro.models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kvcmas.errors import UserError
from repro.models import (
    DEFAULT_MODEL,
    HubSource,
    get_entry,
    list_models,
    load,
    resolve,
)
from repro.models.cli import app

TINY = ("tiny-llama", "tiny-qwen2")
PAPER_REPOSITORIES = {
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct",
    "llava-hf/llava-onevision-qwen2-7b-ov-hf",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REPRO_CACHE", str(folder))
    return folder


@pytest.fixture
def tiny_copy(cache: Path, tmp_path: Path) -> Path:
    """A plain Transformers directory outside the cache, free to be damaged."""
    copy = tmp_path / "my-model"
    shutil.copytree(resolve("tiny-llama").path, copy)
    (copy / "manifest.json").unlink()
    return copy


# Registry


def test_every_paper_model_has_an_entry_and_a_small_stand_in() -> None:
    entries = list_models()
    assert DEFAULT_MODEL in {entry.name for entry in entries}
    hub = {e.origin.repo_id for e in entries if isinstance(e.origin, HubSource)}
    assert hub == PAPER_REPOSITORIES
    for name, paper in (
        ("smollm2-135m", "Llama-3.1-8B-Instruct"),
        ("qwen2.5-coder-0.5b", "Qwen2.5-Coder-7B-Instruct"),
    ):
        assert get_entry(name).stands_in_for == paper


def test_a_local_copy_is_the_first_source_of_every_downloaded_model() -> None:
    for entry in list_models():
        kinds = [source.kind for source in entry.sources]
        assert kinds in (["local", "package"], ["local", "hub"], ["generated"])


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'smolm2'.*did you mean smollm2-135m"):
        get_entry("smolm2")
    with pytest.raises(UserError, match="known: smollm2-135m, "):
        resolve("xyzzy")


def test_a_hub_repository_names_its_entry() -> None:
    assert get_entry("Qwen/Qwen2.5-Coder-7B-Instruct").name == "qwen2.5-coder-7b"


def test_importing_the_package_imports_no_pytorch() -> None:
    code = "import sys, repro.models.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Hub and local copies


def test_unreachable_hub_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    with pytest.raises(UserError) as caught:
        resolve("llama-3.1-8b")
    message = str(caught.value)
    assert "cannot be reached" in message and "\n" not in message
    assert str(cache / "local" / "llama-3.1-8b") in message


def test_a_copy_in_the_cache_is_used_instead_of_the_hub(cache: Path, tiny_copy: Path) -> None:
    shutil.copytree(tiny_copy, cache / "local" / "llama-3.1-8b")
    resolved = resolve("llama-3.1-8b")
    assert (resolved.source, resolved.entry) == ("local", get_entry("llama-3.1-8b"))
    assert resolved.path == cache / "local" / "llama-3.1-8b"


# Directories


def test_a_directory_is_a_model(tiny_copy: Path) -> None:
    resolved = resolve(str(tiny_copy))
    assert (resolved.name, resolved.source, resolved.entry) == ("my-model", "local", None)
    model, tokenizer = load(resolved)
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 5, len(tokenizer))


def test_revision_of_a_directory_follows_its_content(tiny_copy: Path, tmp_path: Path) -> None:
    before = resolve(str(tiny_copy)).revision
    moved = tiny_copy.rename(tmp_path / "elsewhere")
    assert resolve(str(moved)).revision == before
    weights = moved / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    assert resolve(str(moved)).revision != before


@pytest.mark.parametrize(
    ("remove", "complaint"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", r"neither \*.safetensors nor pytorch_model\*.bin"),
    ],
)
def test_incomplete_directory_names_what_is_missing(
    tiny_copy: Path, remove: str, complaint: str
) -> None:
    (tiny_copy / remove).unlink()
    with pytest.raises(UserError, match=complaint):
        resolve(str(tiny_copy))


def test_missing_shard_is_named(tiny_copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tiny_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks 1 weight files, first model-2\.safetensors"):
        resolve(str(tiny_copy))


def test_missing_directory_is_not_taken_for_a_name() -> None:
    with pytest.raises(UserError, match="no model directory at"):
        resolve("./nowhere/at/all")


def test_uninitialised_parameters_are_refused(tiny_copy: Path) -> None:
    weights = tiny_copy / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 parameters.*layers\.2\.mlp\.up_proj"):
        load(resolve(str(tiny_copy)))


def test_truncated_weights_are_refused(tiny_copy: Path) -> None:
    weights = tiny_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"cannot load .*damaged weights"):
        load(resolve(str(tiny_copy)))


def test_malformed_config_is_refused(tiny_copy: Path) -> None:
    (tiny_copy / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot load"):
        load(resolve(str(tiny_copy)))


# Tiny models


@pytest.mark.parametrize("name", (*TINY, "bench-llama"))
def test_generated_models_are_reproducible(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revisions = []
    for attempt in ("first", "second"):
        monkeypatch.setenv("REPRO_CACHE", str(tmp_path / attempt))
        torch.manual_seed(len(revisions))  # whatever the global state is
        revisions.append(resolve(name).revision)
    assert revisions[0] == revisions[1]


@pytest.mark.parametrize("name", TINY)
def test_building_and_loading_leave_no_trace(
    name: str, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    def state() -> tuple[object, ...]:
        levels = logging.get_verbosity(), logging.is_progress_bar_enabled()
        return (*levels, are_progress_bars_disabled(), list(warnings.filters), sys.stderr)

    random_state, before = torch.get_rng_state(), state()
    load(resolve(name))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert state() == before
    assert capfd.readouterr() == ("", "")


def test_tiny_llama_has_grouped_queries_and_every_rope_band(cache: Path) -> None:
    model, _ = load(resolve("tiny-llama"))
    config = model.config
    assert config.num_attention_heads == 4 * config.num_key_value_heads
    assert config.rope_parameters["rope_type"] == "llama3"
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    unscaled = config.rope_parameters["rope_theta"] ** -exponents
    ratio = unscaled / model.model.rotary_emb.inv_freq
    factor = config.rope_parameters["factor"]
    kept, divided = torch.isclose(ratio, torch.ones(())), torch.isclose(ratio, torch.tensor(factor))
    assert kept.any() and divided.any() and (~kept & ~divided).any()


def test_bench_llama_holds_the_longest_context_and_keeps_layers(cache: Path) -> None:
    model, tokenizer = load(resolve("bench-llama"))
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size) == (12, 128)
    assert config.num_key_value_heads * config.head_dim == 128
    assert tokenizer.model_max_length == config.max_position_embeddings >= 40_960
    weight = model.model.layers[5].self_attn.v_proj.weight
    assert weight.std() > 0.05, "saved weights of a real range, nothing that an engine makes up"


def test_tiny_qwen2_has_biases_on_queries_keys_and_values(cache: Path) -> None:
    model, _ = load(resolve("tiny-qwen2"))
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            assert projection.bias.std() > 0.1
        assert attention.o_proj.bias is None


@pytest.mark.parametrize("name", TINY)
def test_tiny_values_depend_on_the_context_beyond_layer_zero(name: str, cache: Path) -> None:
    model, tokenizer = load(resolve(name))
    shared = tokenizer("the shared text of two agents")["input_ids"]
    values = []
    for prefix in ("You add numbers up.", "You write programs!"):
        ids = torch.tensor([tokenizer(prefix)["input_ids"] + shared])
        layers = model(ids).past_key_values.layers
        values.append([layer.values[0, :, -len(shared) :] for layer in layers])
    assert len(values[0]) == 4
    for depth, (one, other) in enumerate(zip(*values, strict=True)):
        change = ((one - other).norm() / one.norm()).item()
        assert change < 1e-6 if depth == 0 else change > 0.1, (depth, change)


@pytest.mark.parametrize("name", TINY)
def test_tiny_tokenizer_is_bytes_and_chatml(name: str, cache: Path) -> None:
    _, tokenizer = load(resolve(name))
    text = "Ünïcödé 東京 🙂\n\tdef f(x):  return x**2\x00"
    ids = tokenizer(text)["input_ids"]
    assert [token - 3 for token in ids] == list(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    start = "<|bos|>" if name == "tiny-llama" else ""
    assert chat == (
        f"{start}<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]
    assert tokenizer(chat)["input_ids"].count(tokenizer.bos_token_id) == chat.count("<|bos|>")


# Loading


def test_load_gives_an_inference_model_of_the_wanted_dtype(cache: Path) -> None:
    model, _ = load(resolve("tiny-qwen2"), dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_unusable_dtype_and_device_are_refused(cache: Path) -> None:
    resolved = resolve("tiny-llama")
    with pytest.raises(UserError, match="unknown dtype 'int3'; one of auto, float32"):
        load(resolved, dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="device 'cuda:99' cannot be used"):
        load(resolved, device="cuda:99")
    with pytest.raises(UserError, match="device 'toaster' cannot be used"):
        load(resolved, device="toaster")


# Command line


def _listed() -> dict[str, str]:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0, result.output
    return {line.split()[0]: line for line in result.stdout.splitlines() if line.split()}


def test_cli_lists_every_model_and_whether_it_is_there(cache: Path) -> None:
    rows = _listed()
    for entry in list_models():
        assert entry.licence in rows[entry.name]
    assert " no " in rows["tiny-llama"]
    resolve("tiny-llama")
    assert " yes " in _listed()["tiny-llama"]


def test_cli_prints_the_path_alone_on_stdout(cache: Path) -> None:
    result = CliRunner().invoke(app, ["get", "tiny-llama", "--verify"])
    assert result.stdout == f"{cache / 'models' / 'tiny-llama'}\n"
    assert "generated" in result.stderr and "verified" in result.stderr


def test_cli_passes_user_errors_on() -> None:
    result = CliRunner().invoke(app, ["get", "tiny-lama"])
    assert isinstance(result.exception, UserError)
    assert "tiny-llama" in str(result.exception)


def test_verdicts_know_which_models_have_random_weights() -> None:
    from repro.models.entries import GeneratedSource
    from repro.models.registry import list_models
    from results.names import RANDOM_WEIGHTS

    generated = {
        entry.name
        for entry in list_models()
        if any(isinstance(source, GeneratedSource) for source in entry.sources)
    }
    assert generated == RANDOM_WEIGHTS
