"""Images and clips: where they lie, what identifies them, their pixels."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kvcmas.errors import UserError

Kind = Literal["image", "video"]
# One picture, [height, width, 3], RGB.
Pixels = NDArray[np.uint8]

# What PIL raises on a file that is no picture, is damaged, or is far too large.
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)


class Media(Protocol):
    """An image or a video clip."""

    @property
    def kind(self) -> Kind:
        """What it is."""
        ...

    @property
    def count(self) -> int:
        """How many pictures :meth:`frames` returns."""
        ...

    @property
    def name(self) -> str:
        """What it is called in messages and records; no path of this machine."""
        ...

    def fingerprint(self) -> str:
        """Identity of the content, for the dataset's hash."""
        ...

    def exists(self) -> bool:
        """Whether it is where it should be."""
        ...

    def check(self) -> None:
        """Look whether it can be opened, without decoding all of it.

        Raises:
            UserError: it cannot.
        """
        ...

    def frames(self) -> list[Pixels]:
        """The image, or the video's sampled frames in order.

        Raises:
            UserError: it cannot be read.
        """
        ...


@dataclass(frozen=True)
class ImageFile:
    """An image in a file; ``name`` is its path within the benchmark's folder."""

    path: Path
    name: str
    kind: Kind = "image"
    count: int = 1

    def fingerprint(self) -> str:
        """Hash of the file."""
        return _sha256(self._content())

    def exists(self) -> bool:
        """Whether the file is there."""
        return self.path.is_file()

    def check(self) -> None:
        """See :class:`Media`."""
        try:
            with Image.open(self.path) as image:
                image.verify()
        except _UNREADABLE as error:
            raise UserError(_complaint(self.name, error)) from error

    def frames(self) -> list[Pixels]:
        """See :class:`Media`."""
        return [decode_image(self._content(), self.name)]

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UserError(_complaint(self.name, error)) from error


@dataclass(frozen=True)
class ImageBytes:
    """An encoded image in memory, as the hub hands it out."""

    name: str
    content: bytes = field(repr=False)
    kind: Kind = "image"
    count: int = 1

    def fingerprint(self) -> str:
        """Hash of the encoded image."""
        return _sha256(self.content)

    def exists(self) -> bool:
        """It is always there."""
        return True

    def check(self) -> None:
        """See :class:`Media`."""
        try:
            with Image.open(io.BytesIO(self.content)) as image:
                image.verify()
        except _UNREADABLE as error:
            raise UserError(_complaint(self.name, error)) from error

    def frames(self) -> list[Pixels]:
        """See :class:`Media`."""
        return [decode_image(self.content, self.name)]


def decode_image(content: bytes, name: str) -> Pixels:
    """RGB pixels of an encoded image; what is transparent shows white, as on paper.

    Raises:
        UserError: it is no image, is damaged, or is far too large.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return np.asarray(on_white(image))
    except _UNREADABLE as error:
        raise UserError(_complaint(name, error)) from error


def on_white(image: Image.Image) -> Image.Image:
    """``image`` as RGB. Plain conversion would show whatever colour hides behind transparency."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    paper = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(paper, layer).convert("RGB")


def _complaint(name: str, error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    else:  # PIL's texts name the buffer by its address, or the file by its whole path
        reason = str(error).partition(" <_io")[0].partition(" '/")[0] or type(error).__name__
    return f"cannot read image {name}: {reason}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
