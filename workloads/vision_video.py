"""Frames of a video clip, read with PyAV (paper B.1: 32 of them)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcmas.errors import UserError
from workloads.vision_media import Kind, Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

FRAMES = 32
# Seconds that are decoded rather than jumped over: a jump lands on the key frame before its target.
_JUMP_S = 10
# Seconds by which a header may promise more than there is.
_SHORT_S = 1
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Clip:
    """A video file; ``count`` frames are sampled evenly from its first to its last one."""

    path: Path
    name: str
    count: int = FRAMES
    kind: Kind = "video"

    def fingerprint(self) -> str:
        """Hash of size, beginning and end: whole benchmarks of clips are too large to read."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(f"{size} {self.count} ".encode())
        with self.path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
        return digest.hexdigest()

    def exists(self) -> bool:
        """Whether the file is there."""
        return self.path.is_file()

    def check(self) -> None:
        """See :class:`~workloads.vision_media.Media`."""
        with _opened(self) as container:
            _stream(container, self.name)

    def frames(self) -> list[Pixels]:
        """See :class:`~workloads.vision_media.Media`."""
        import av

        try:
            with _opened(self) as container:
                return _sampled(container, self)
        except (av.FFmpegError, OverflowError) as error:
            raise UserError(f"cannot read video {self.name}: {_reason(error)}") from error


def even_positions(first: int, last: int, count: int) -> list[int]:
    """``count`` whole numbers from ``first`` to ``last``, evenly spread and rounded down."""
    if count == 1:
        return [first]
    return [first + (last - first) * i // (count - 1) for i in range(count)]


def _opened(clip: Clip) -> InputContainer:
    try:
        import av
    except ImportError as error:
        raise UserError("videos are read with PyAV: pip install av") from error
    try:
        return av.open(str(clip.path))
    except (av.FFmpegError, OSError) as error:
        raise UserError(f"cannot read video {clip.name}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What went wrong, without the path that FFmpeg's texts end in."""
    return getattr(error, "strerror", None) or type(error).__name__


def _stream(container: InputContainer, name: str) -> VideoStream:
    if not container.streams.video:
        raise UserError(f"cannot read video {name}: it has no pictures")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _sampled(container: InputContainer, clip: Clip) -> list[Pixels]:
    """The frame shown at each sampled time."""
    stream = _stream(container, clip.name)
    first, last = _span(container, stream, clip.name)
    assert stream.time_base is not None
    jump, short = int(_JUMP_S / stream.time_base), int(_SHORT_S / stream.time_base)
    shown: list[Pixels] = []
    frames = _decoded(container, stream)
    current = next(frames, None)
    following = next(frames, None)
    for target in even_positions(first, last, clip.count):
        if following is not None and target - _pts(following) > jump:
            container.seek(target, stream=stream)
            frames = _decoded(container, stream)
            current, following = next(frames, current), next(frames, None)
        while following is not None and _pts(following) <= target:
            current, following = following, next(frames, None)
        if current is None:
            raise UserError(f"cannot read video {clip.name}: no frame can be decoded")
        if following is None and target - _pts(current) > short:
            end = float(_pts(current) * stream.time_base)
            raise UserError(f"cannot read video {clip.name}: it breaks off after {end:.1f} s")
        shown.append(np.asarray(current.to_ndarray(format="rgb24")))
    return shown


def _span(container: InputContainer, stream: VideoStream, name: str) -> tuple[int, int]:
    """Presentation times of the first and the last frame, in units of the stream's time base.

    Taken from the header; a file without one is decoded once to the end.
    """
    base, rate = stream.time_base, stream.average_rate
    if base and rate and stream.duration:
        first = stream.start_time or 0
        return first, first + max(0, stream.duration - int(Fraction(1) / rate / base))
    times = [_pts(frame) for frame in _decoded(container, stream)]
    if not times or not base:
        raise UserError(f"cannot read video {name}: no frame can be decoded")
    container.seek(times[0], stream=stream)
    return times[0], times[-1]


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Frames from here on that have a time."""
    return (frame for frame in container.decode(stream) if frame.pts is not None)


def _pts(frame: VideoFrame) -> int:
    assert frame.pts is not None
    return frame.pts


def sample_evenly(frames: Sequence[Pixels], count: int) -> list[Pixels]:
    """``count`` of ``frames``, from the first to the last, by the rule for files."""
    return [frames[i] for i in even_positions(0, len(frames) - 1, count)]
