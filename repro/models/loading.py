"""Opens a Transformers directory for inference, quietly and without side effects."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from kvcmas.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import (
        LlavaOnevisionImageProcessorPil,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from repro.models.resolve import ResolvedModel

DType = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(
    resolved: ResolvedModel, *, dtype: DType = "auto", device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in evaluation mode, without gradients, and its tokenizer.

    Args:
        resolved: A model directory, see ``repro.models.resolve``.
        dtype: Element type of the weights; ``auto`` keeps the stored one.
        device: Any device PyTorch knows, for instance ``cpu`` or ``cuda:0``.

    Raises:
        UserError: Unknown dtype, unusable device, or a directory Transformers cannot open or that
            leaves weights uninitialised.
    """
    import torch

    if dtype not in _DTYPES:
        raise UserError(f"unknown dtype '{dtype}'; one of {', '.join(_DTYPES)}")
    check_device(device)
    element_type = dtype if dtype == "auto" else getattr(torch, dtype)
    with quiet_transformers():
        try:
            model = load_weights(resolved.path, dtype=element_type, device=device)
            return model, load_tokenizer(resolved.path)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UserError(f"cannot load {resolved.path}: {_first_line(error)}") from error


def check_device(device: str | torch.device) -> None:
    """See that tensors can be made on a device.

    Raises:
        UserError: they cannot.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device '{device}' cannot be used: {_first_line(error)}") from error


def load_weights(
    directory: Path,
    *,
    dtype: torch.dtype | str,
    device: str | torch.device = "cpu",
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """Return the model stored in ``directory`` with SDPA attention, in evaluation mode.

    Raises:
        ValueError: The stored weights leave parameters uninitialised.
        OSError: Transformers cannot read the directory.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # Transformers tells an absent file_name from None, so pass it only when it is there.
    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    config = AutoConfig.from_pretrained(directory, **extra)
    has_vision = getattr(config, "vision_config", None) is not None
    auto_class: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    try:
        model: PreTrainedModel
        model, report = auto_class.from_pretrained(
            directory,
            dtype=dtype,
            device_map={"": device},
            attn_implementation="sdpa",
            output_loading_info=True,
            **extra,
        )
    except SafetensorError as error:
        raise ValueError(f"damaged weights: {error}") from error
    absent = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
    if absent:
        raise ValueError(f"the weights lack {len(absent)} parameters, for instance {absent[0]}")
    return model.eval().requires_grad_(False)


def load_tokenizer(directory: Path, *, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored in ``directory``."""
    from transformers import AutoTokenizer

    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    tokenizer = AutoTokenizer.from_pretrained(directory, **extra)
    # Older vision-language models keep their template where only a processor looks for it.
    template = directory / "chat_template.json"
    if not tokenizer.chat_template and template.is_file():
        tokenizer.chat_template = json.loads(template.read_text(encoding="utf-8"))["chat_template"]
    return tokenizer


def load_image_processor(resolved: ResolvedModel) -> LlavaOnevisionImageProcessorPil:
    """Return the image processor of a LLaVA-OneVision, in the version that needs no torchvision.

    The same version runs everywhere, so that two machines see the same pixels.

    Raises:
        UserError: The model has none, or its configuration cannot be read.
    """
    from transformers import LlavaOnevisionImageProcessorPil

    if not (resolved.path / "preprocessor_config.json").is_file():
        raise UserError(
            f"{resolved.name} takes no images; give a LLaVA-OneVision, for instance "
            "--model tiny-llava-onevision"
        )
    with quiet_transformers():
        try:
            return LlavaOnevisionImageProcessorPil.from_pretrained(resolved.path)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"cannot load the image processor of {resolved.path}: {_first_line(error)}"
            ) from error


@contextlib.contextmanager
def quiet_transformers(*, keep_bars: bool = False) -> Iterator[None]:
    """Keep Transformers and its hub client off the terminal inside the block, and only there.

    Covers log messages and load reports, warnings, progress bars, and the bar of the GGUF reader,
    which has no switch and is caught on ``sys.stderr``.

    Args:
        keep_bars: Leave progress bars and ``sys.stderr`` alone.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    had_bars, hub_had_none = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.set_verbosity, level)
        logging.set_verbosity_error()
        stack.callback(hub_logging.set_verbosity, hub_level)
        hub_logging.set_verbosity_error()
        if not keep_bars:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            if hub_had_none:
                stack.callback(disable_progress_bars)
            if had_bars:
                stack.callback(logging.enable_progress_bar)  # also shows the hub's, see above
            logging.disable_progress_bar()
        yield


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
