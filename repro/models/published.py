"""Published configurations: a model's shape and the bytes of its weights, without its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcmas.errors import UserError
from repro.models.entries import HubSource, ModelEntry
from repro.models.loading import DType, quiet_transformers
from repro.models.registry import list_models
from repro.models.resolve import resolve

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kvcmas.engine.adapter import ModelSpec

_QWEN2_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}

# What decides sizes in the config.json of each registry entry's revision. Packages: of the
# directory that the suite makes of them.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "qwen2.5-coder-7b": {**_QWEN2_7B, "vocab_size": 152_064},
    "llava-onevision-7b": {
        "model_type": "llava_onevision",
        "text_config": {**_QWEN2_7B, "vocab_size": 152_128},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 384,
            "vision_use_head": False,
        },
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2.5-coder-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Figures:
    """What sizes follow from.

    Attributes:
        parameters: of everything that is loaded, vision tower included; tied ones count once.
        origin: where the configuration comes from.
    """

    name: str
    spec: ModelSpec
    parameters: int
    weight_bytes: int
    origin: str


@dataclass(frozen=True)
class Configuration:
    """A model's configuration and the element type that its weights are stored in."""

    name: str
    config: PretrainedConfig
    dtype: str
    origin: str


def configuration(name: str) -> Configuration:
    """Configuration of a registry entry or a Transformers directory. Nothing is downloaded.

    Raises:
        UserError: no such model, or a directory whose configuration cannot be read.
    """
    import torch
    from transformers import AutoConfig

    entry = next((e for e in list_models() if name in (e.name, _repository(e))), None)
    if entry is not None and entry.name in PUBLISHED:
        config = AutoConfig.for_model(**PUBLISHED[entry.name])
        return Configuration(entry.name, config, entry.dtype, "published configuration")
    path = resolve(name).path
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} has no configuration that can be read") from error
    stored = str(config.dtype or torch.float32).removeprefix("torch.")
    origin = "configuration of the model directory"
    return Configuration(name if entry is None else entry.name, config, stored, origin)


def figures(name: str, dtype: DType = "auto") -> Figures:
    """Figures of a registry entry or a Transformers directory. Nothing is downloaded.

    Args:
        dtype: element type of weights and caches; ``auto`` is the stored one.

    Raises:
        UserError: no such model, or an architecture that is not supported.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from kvcmas.engine.adapter import TransformersAdapter

    found = configuration(name)
    chosen = getattr(torch, found.dtype if dtype == "auto" else dtype)
    vision = getattr(found.config, "vision_config", None) is not None
    auto_class: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    with quiet_transformers(), torch.device("meta"):
        empty = auto_class.from_config(found.config, dtype=chosen)
    weights = list(empty.parameters())
    return Figures(
        name=found.name,
        spec=TransformersAdapter(empty).spec,
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        origin=found.origin,
    )


def _repository(entry: ModelEntry) -> str:
    return entry.origin.repo_id if isinstance(entry.origin, HubSource) else ""
