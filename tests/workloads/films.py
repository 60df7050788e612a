"""Writing clips as real video files, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np

from workloads.vision_media import Pixels


def write_clip(
    path: Path, frames: Iterable[Pixels], *, codec: str = "libx264", rate: int = 25, gop: int = 250
) -> None:
    """Encode ``frames`` of one size into ``path``; its ending chooses the container."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.pix_fmt = "yuv420p"
        stream.gop_size = gop
        for number, pixels in enumerate(frames):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def ramp(count: int, height: int = 48, width: int = 64) -> list[Pixels]:
    """Grey frames, each one a little brighter, so that a frame tells its number."""
    levels = np.linspace(0, 250, count).round().astype(np.uint8)
    return [np.full((height, width, 3), level, dtype=np.uint8) for level in levels]
