"""Converts a GGUF file into a Transformers directory with safetensors weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcmas.errors import UserError
from repro.models.loading import load_tokenizer, load_weights, quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from repro.models.entries import PackageSource


def convert_gguf(gguf: Path, source: PackageSource, output: Path) -> None:
    """Dequantise ``gguf`` to float32 and save model and tokenizer into ``output``.

    Raises:
        UserError: The result does not tokenise or stop as the entry's probe says.
        OSError: ``output`` cannot be written.
    """
    import torch
    from safetensors import SafetensorError

    with quiet_transformers():
        model: Any = load_weights(gguf.parent, dtype=torch.float32, gguf_file=gguf.name)
        tokenizer = load_tokenizer(gguf.parent, gguf_file=gguf.name)
        _restore_pre_tokenizer(tokenizer, source)
        tokenizer.model_max_length = model.config.max_position_embeddings
        # The tensors are plain float32 now: without these two lines the saved model would claim
        # to be quantised and saving it would be refused.
        model.hf_quantizer = None
        del model.config.quantization_config
        stop_ids = [tokenizer.convert_tokens_to_ids(token) for token in source.stop_tokens]
        model.generation_config.eos_token_id = stop_ids
        try:
            model.save_pretrained(output)
        except SafetensorError as error:
            raise OSError(f"cannot write the weights: {error}") from error
        # Transformers notes whether it was offline, which is no property of the model.
        tokenizer.init_kwargs["local_files_only"] = False
        tokenizer.save_pretrained(output)
        _check_tokenizer(output, source)


def _restore_pre_tokenizer(tokenizer: PreTrainedTokenizerBase, source: PackageSource) -> None:
    """Give the tokenizer the text splitting that the GGUF names and Transformers ignores.

    SmolLM2 splits off every digit before the GPT-2 pattern applies, which decides how white space
    before a number is joined. Qwen2's pattern is restored by Transformers, its NFC step is not.
    """
    from tokenizers import normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if source.pre_tokenizer == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    else:
        backend.normalizer = normalizers.NFC()


def _check_tokenizer(directory: Path, source: PackageSource) -> None:
    tokenizer = load_tokenizer(directory)
    text, expected = source.probe
    ids = tokenizer(text)["input_ids"]
    if tuple(ids) != expected or tokenizer.decode(ids) != text or not tokenizer.chat_template:
        raise UserError(
            f"the converted tokenizer gives {ids} for {text!r} instead of {list(expected)}; "
            "this version of Transformers reads the GGUF differently"
        )
