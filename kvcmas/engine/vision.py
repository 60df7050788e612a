"""Images and videos of LLaVA-OneVision as rows of a prompt (paper B.1).

The vision tower and its projector run once per picture; what they give is the hidden state at layer
0 of the rows that stand for it. From there on a picture's row is a row like any other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlavaOnevisionImageProcessorPil, PreTrainedConfig, PreTrainedModel

from kvcmas.engine.segments import Visual
from kvcmas.errors import UserError

# One picture, [height, width, 3], RGB.
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """An image or a video as the language model takes it.

    Attributes:
        token: id of its placeholder, one per row of ``features``.
        features: projected features, ``[rows, hidden]``.
        sha256: hash of the processed pixels, so it covers the image processor's settings.
    """

    token: int
    features: Tensor
    sha256: str

    @property
    def ids(self) -> tuple[int, ...]:
        """The placeholders, ``[rows]``."""
        return (self.token,) * len(self.features)

    def at(self, start: int) -> Visual:
        """The picture as part of a segment, from row ``start`` of it."""
        return Visual(start, self.features, self.sha256)


class VisualEncoder:
    """Turns pixels into features with a model's own vision tower and projector.

    Images go through the any-resolution path: a base view and the tiles of the best grid, so the
    number of rows follows the image's shape. Video frames are resized to the tower's square and
    pooled two by two (384 x 384 pixels: 27 x 27 patches, 196 rows a frame), with one closing row.

    The PIL version of Transformers' image processor prepares both, because its video processor
    needs torchvision.

    Raises:
        UserError: a model that is not LLaVA-OneVision.
    """

    def __init__(self, model: PreTrainedModel, processor: LlavaOnevisionImageProcessorPil) -> None:
        config = model.config
        if config.model_type != "llava_onevision":
            raise UserError(
                f"model type {config.model_type!r} takes no images; a LLaVA-OneVision is needed"
            )
        # Which methods a model class has is not in the types of Transformers.
        self._model: Any = model
        self._processor: Any = processor
        self._image_token: int = config.image_token_index
        self._video_token: int = config.video_token_index

    @property
    def processor(self) -> str:
        """Name of what prepares pixels, for records."""
        return type(self._processor).__name__

    @torch.inference_mode()
    def image(self, pixels: Pixels) -> Picture:
        """One image at any resolution.

        Raises:
            ValueError: no pixels, or a side too short for its length.
        """
        _check(pixels)
        made = self._processor(pixels[None], input_data_format="channels_last", return_tensors="pt")
        values, sizes = made["pixel_values"], made["image_sizes"]
        seen = self._model.get_image_features(self._on_device(values), sizes)
        (features,) = seen.pooler_output
        return Picture(self._image_token, features, _sha256("image", values, sizes))

    @torch.inference_mode()
    def video(self, frames: Sequence[Pixels]) -> Picture:
        """A video by its frames, in order.

        Raises:
            ValueError: no frame, or a frame without pixels.
        """
        if not len(frames):
            raise ValueError("a video needs at least one frame")
        values = torch.from_numpy(np.stack([self._frame(frame) for frame in frames])[None])
        seen = self._model.get_video_features(self._on_device(values))
        (features,) = seen.pooler_output
        return Picture(self._video_token, features, _sha256("video", values))

    def _frame(self, pixels: Pixels) -> NDArray[np.float32]:
        """``[3, size, size]``; its sides change independently, as in Transformers' own videos."""
        _check(pixels)
        use = self._processor
        resized = use.resize(np.moveaxis(pixels, 2, 0), size=use.size, resample=use.resample)
        scaled = use.rescale(resized, use.rescale_factor)
        return use.normalize(scaled, use.image_mean, use.image_std).astype(np.float32)

    def _on_device(self, values: Tensor) -> Tensor:
        return values.to(self._model.device, self._model.dtype)


def most_rows(config: PreTrainedConfig, frames: int | None) -> int:
    """How many rows an image (``frames`` None) or a video can have at most, without looking at it.

    An image has its base view, and the tiles of the largest grid with a line end per row of
    patches; beyond the model's limit of tiles Transformers shrinks the grid, but not within 10%.
    """
    side = config.vision_config.image_size // config.vision_config.patch_size
    if frames is not None:
        return frames * math.ceil(side / 2) ** 2 + 1
    tile = config.vision_config.image_size
    grids = [(h // tile, w // tile) for h, w in config.image_grid_pinpoints]
    limit = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    tiles = min(max(h * w for h, w in grids), limit * 1.1**2)
    return side**2 + math.ceil(side**2 * tiles) + side * max(h for h, _ in grids)


def _check(pixels: Pixels) -> None:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"pixels are [height, width, 3], not {list(pixels.shape)}")


def _sha256(kind: str, *tensors: Tensor) -> str:
    digest = hashlib.sha256(kind.encode())
    for tensor in tensors:
        digest.update(f" {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
