"""Small models with random weights: what a real one has in structure, in a few megabytes.

The tiny ones serve tests and dry runs, the bench one timing at long contexts, where weights do not
matter but layers do. Weights, norms and biases are large enough that attention depends on the
context and that leaving out a norm weight or a bias shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from repro.models.entries import GeneratedSource

BOS, TURN_START, TURN_END = "<|bos|>", "<|im_start|>", "<|im_end|>"

_CONTEXT = 4096
_BENCH_CONTEXT = 40_960
_WEIGHT_STD = 0.08
_BIAS_STD = 0.5
_NORM_STD = 0.1

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(source: GeneratedSource, output: Path) -> None:
    """Write the model of ``source`` with its tokenizer into ``output`` (10 to 13 MB).

    The same source gives the same bytes. PyTorch's global random state is left as it was.
    """
    import torch
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM

    from repro.models.loading import quiet_transformers

    context = _CONTEXT if source.shape == "tiny" else _BENCH_CONTEXT
    tokenizer = byte_tokenizer(with_bos=source.architecture == "llama", context=context)
    config = text_config(source.architecture, source.shape, tokenizer)
    model_class = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[source.architecture]
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        model = model_class(config)
        randomise(model, source.seed)
        model.generation_config.eos_token_id = [config.eos_token_id]
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)


def byte_tokenizer(*, with_bos: bool, context: int = _CONTEXT) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte, special tokens and a ChatML chat template.

    Ids 0 to 2 are the special tokens, 3 + b is byte b. Opened from the directory of a Qwen2 model
    it gains Qwen2's NFC normalisation, because Transformers opens that as a Qwen2 tokenizer.

    Args:
        with_bos: Let the chat template open with the BOS token, as Llama 3.1's does. The tokenizer
            itself never adds one.
        context: Longest input, in tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (BOS, TURN_START, TURN_END)
    letters = [_byte_letter(byte) for byte in range(256)]
    vocab = {token: index for index, token in enumerate((*special, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=TURN_END,
        pad_token=TURN_END,
        additional_special_tokens=[TURN_START],
        model_max_length=context,
        chat_template=("{{ bos_token }}" if with_bos else "") + _CHATML,
    )


def _byte_letter(byte: int) -> str:
    """Return the printable letter that byte-level BPE writes for ``byte``."""
    # GPT-2's table: printable Latin-1 stands for itself, the rest follows from code point 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in printable))


# Twelve layers, because on four the two layers that CacheBlend executes in full would decide how
# the methods rank.
_SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "bench": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}


def text_config(
    architecture: str, size: str, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    """Return the configuration of a ``llama`` or ``qwen2`` of that size over ``tokenizer``."""
    from transformers import LlamaConfig, Qwen2Config

    shape = {
        **_SHAPES[size],
        "vocab_size": len(tokenizer),
        "max_position_embeddings": tokenizer.model_max_length,
        "initializer_range": _WEIGHT_STD,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "qwen2":
        return Qwen2Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 10_000})
    if size == "bench":
        rope = {"rope_type": "default", "rope_theta": 500_000.0}
        return LlamaConfig(**shape, rope_parameters=rope)
    # An original context of 512 puts rotary frequencies into all three bands of the scaling rule.
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return LlamaConfig(**shape, rope_parameters=scaling)


def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter of ``model`` from ``seed``, in the order in which it lists them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, _BIAS_STD, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(1.0, _NORM_STD, generator=generator)
            else:
                parameter.normal_(0.0, _WEIGHT_STD, generator=generator)
