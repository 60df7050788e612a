"""A tiny LLaVA-OneVision with random weights: every path of the real one, in a few megabytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.models.tiny import TURN_END, byte_tokenizer, randomise, text_config

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import LlavaOnevisionConfig, PreTrainedTokenizerBase

    from repro.models.entries import GeneratedSource

IMAGE, VIDEO = "<image>", "<video>"

# Bytes are tokens here, so four agents and a long question need more room than elsewhere.
_CONTEXT = 16_384
# 4 x 4 patches a tile, 2 x 2 rows a frame. (The paper's model: 384, 14, 27 x 27 and 14 x 14.)
_TILE, _PATCH = 56, 14
_MOST_TILES = 4
# SigLIP's.
_MEAN = _STD = [0.5, 0.5, 0.5]

# Such templates take messages as lists of parts. Images come in by the suite itself, as part of the
# question.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} \n"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_vision(source: GeneratedSource, output: Path) -> None:
    """Write the model of ``source`` with tokenizer and image processor into ``output``.

    The same source gives the same bytes. PyTorch's global random state is left as it was.
    """
    import torch
    from transformers import (
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessorPil,
    )

    from repro.models.loading import quiet_transformers

    tokenizer = byte_tokenizer(with_bos=False, context=_CONTEXT)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE, VIDEO]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = _TEMPLATE
    config = _config(tokenizer)
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": _TILE, "width": _TILE},
        image_grid_pinpoints=config.image_grid_pinpoints,
        image_mean=_MEAN,
        image_std=_STD,
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        model = LlavaOnevisionForConditionalGeneration(config)
        randomise(model, source.seed)
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(TURN_END)]
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        processor.save_pretrained(output)


def _config(tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
    from transformers import LlavaOnevisionConfig

    ids = tokenizer.get_vocab()
    return LlavaOnevisionConfig(
        text_config=text_config("qwen2", "tiny", tokenizer),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": _TILE,
            "patch_size": _PATCH,
            "vision_use_head": False,
        },
        image_token_index=ids[IMAGE],
        video_token_index=ids[VIDEO],
        image_grid_pinpoints=[
            [_TILE * rows, _TILE * columns]
            for rows in range(1, _MOST_TILES + 1)
            for columns in range(1, _MOST_TILES + 1)
        ],
        tie_word_embeddings=False,
    )
