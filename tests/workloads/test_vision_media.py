"""Images out of files and bytes: pixels, transparency, damage."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kvcmas.errors import UserError
from workloads.vision_media import ImageBytes, ImageFile, Media


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def both(tmp_path: Path, content: bytes) -> list[Media]:
    (tmp_path / "x.png").write_bytes(content)
    return [ImageFile(tmp_path / "x.png", "x.png"), ImageBytes("x.png", content)]


def test_pixels_are_rgb_in_reading_order(tmp_path: Path) -> None:
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[0, 2] = (255, 0, 0)
    for media in both(tmp_path, encoded(Image.fromarray(pixels))):
        media.check()
        (frame,) = media.frames()
        assert np.array_equal(frame, pixels) and media.kind == "image" and media.exists()


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "RGBA", "LA"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    image = Image.new("L", (4, 4), 255).convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    for media in both(tmp_path, encoded(image, kind)):
        assert media.frames()[0].shape == (4, 4, 3)


def test_what_is_transparent_shows_white(tmp_path: Path) -> None:
    """Plain conversion would show the black behind it, and black text on top would vanish."""
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    for media in both(tmp_path, encoded(image)):
        assert media.frames()[0].tolist() == [[[255, 255, 255], [0, 0, 0]]]


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_what_is_no_image_gets_one_line(tmp_path: Path, content: bytes) -> None:
    for media in both(tmp_path, content):
        for look in (media.check, media.frames):
            with pytest.raises(UserError, match=r"^cannot read image x.png: ") as raised:
                look()
            message = str(raised.value)
            assert "\n" not in message and "0x" not in message and str(tmp_path) not in message


def test_a_cut_image_is_damaged(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG"):
        content = encoded(Image.fromarray(noise), kind)
        for media in both(tmp_path, content[: len(content) // 2]):
            with pytest.raises(UserError, match="cannot read image"):
                media.frames()


def test_an_absent_file(tmp_path: Path) -> None:
    media = ImageFile(tmp_path / "gone.png", "images/gone.png")
    assert not media.exists()
    for look in (media.check, media.frames, media.fingerprint):
        with pytest.raises(UserError, match=r"cannot read image images/gone.png: No such file"):
            look()


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for media in both(tmp_path, encoded(Image.new("RGB", (100, 100)))):
        with pytest.raises(UserError, match=r"cannot read image x\.png"):
            media.frames()
