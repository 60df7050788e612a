"""Random weights in the shape of a published configuration: what a model costs needs no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcmas.errors import UserError
from repro.models.loading import DType, quiet_transformers
from repro.models.published import Configuration, configuration

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def text_configuration(name: str) -> Configuration:
    """Configuration of a text model.

    Raises:
        UserError: no such model, or one with a vision tower.
    """
    found = configuration(name)
    if getattr(found.config, "vision_config", None) is not None:
        raise UserError(f"{found.name} has a vision tower; random weights are for text models")
    return found


def load_dummy(
    name: str, *, dtype: DType = "auto", device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """A text model with seeded random weights, made on the device; nothing is downloaded.

    PyTorch's global random state is left as it was.

    Raises:
        UserError: no such model, one with a vision tower, or no room on the device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    found = text_configuration(name)
    chosen = getattr(torch, found.dtype if dtype == "auto" else dtype)
    place = torch.device(device)
    on_cuda = [place.index or 0] if place.type == "cuda" else []
    auto_class: Any = AutoModelForCausalLM
    try:
        with torch.random.fork_rng(devices=on_cuda), quiet_transformers(), place:
            torch.manual_seed(0)
            model: PreTrainedModel = auto_class.from_config(
                found.config, dtype=chosen, attn_implementation="sdpa"
            )
    except torch.OutOfMemoryError as error:
        raise UserError(f"{found.name} does not fit on {device}") from error
    return model.eval().requires_grad_(False)
