"""Frames out of real files: which ones, in what order, and what is said when there are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcmas.errors import UserError
from tests.workloads.films import ramp, write_clip
from workloads.vision_video import Clip, even_positions, sample_evenly

NOISE = 3  # grey levels by which a codec may be off


@pytest.mark.parametrize(
    ("name", "codec", "count"),
    [
        ("short.mp4", "libx264", 5),
        ("clip.mp4", "libx264", 100),
        ("clip.mkv", "libx264", 100),  # its header has no duration of the stream
        ("clip.webm", "libvpx-vp9", 40),
        ("clip.avi", "mpeg4", 60),
    ],
)
def test_frames_are_spread_evenly(tmp_path: Path, name: str, codec: str, count: int) -> None:
    frames = ramp(count)
    write_clip(tmp_path / name, frames, codec=codec)
    got = Clip(tmp_path / name, name).frames()
    assert len(got) == 32 and got[0].shape == (48, 64, 3) and got[0].dtype == np.uint8
    expected = [frame.mean() for frame in sample_evenly(frames, 32)]
    levels = [frame.mean() for frame in got]
    if codec == "mpeg4":  # coarse, but never another frame
        assert np.abs(np.subtract(levels, expected)).max() < 250 / count * 1.5
    else:
        assert np.abs(np.subtract(levels, expected)).max() < NOISE


def test_long_clips_are_jumped_through(tmp_path: Path) -> None:
    """Half a frame a second: every target lies far behind the one before."""
    frames = ramp(300)
    write_clip(tmp_path / "long.mp4", frames, rate=1, gop=12)
    got = Clip(tmp_path / "long.mp4", "long.mp4", count=8).frames()
    expected = [frame.mean() for frame in sample_evenly(frames, 8)]
    assert np.abs(np.subtract([frame.mean() for frame in got], expected)).max() < NOISE


def test_even_positions() -> None:
    assert even_positions(0, 9, 4) == [0, 3, 6, 9]
    assert even_positions(5, 5, 3) == [5, 5, 5]
    assert even_positions(7, 90, 1) == [7]
    spread = even_positions(0, 100, 32)
    assert spread == [int(x) for x in np.linspace(0, 100, 32, dtype=int)]
    assert sample_evenly(ramp(3), 1)[0].mean() == 0


def test_unreadable_clips_get_one_line(tmp_path: Path) -> None:
    write_clip(tmp_path / "ok.mp4", ramp(50))
    content = (tmp_path / "ok.mp4").read_bytes()
    cases = {
        "text.mp4": b"this is no video" * 50,
        "empty.mp4": b"",
        "cut.mp4": content[: len(content) // 2],
    }
    for name, damaged in cases.items():
        (tmp_path / name).write_bytes(damaged)
    for name in (*cases, "absent.mp4"):
        clip = Clip(tmp_path / name, name)
        for look in (clip.check, clip.frames):
            with pytest.raises(UserError, match=f"cannot read video {name}: ") as raised:
                look()
            assert "\n" not in str(raised.value) and str(tmp_path) not in str(raised.value)


def test_sound_alone_is_no_clip(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono"
        )
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(UserError, match="it has no pictures"):
        Clip(tmp_path / "sound.wav", "sound.wav").check()


def test_a_clip_that_breaks_off_is_refused(tmp_path: Path) -> None:
    """Its header, which comes first, still promises all of it."""
    import av

    path = tmp_path / "broken.mp4"
    noise = np.random.default_rng(0)
    frames = [noise.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(200)]
    write_clip(tmp_path / "whole.mp4", frames)
    with (
        av.open(str(tmp_path / "whole.mp4")) as whole,
        av.open(str(path), "w", options={"movflags": "faststart"}) as moved,
    ):
        stream = moved.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(whole.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                moved.mux(packet)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cannot read video broken.mp4: "):
        Clip(path, path.name).frames()


def test_the_fingerprint_follows_content_and_sampling(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", ramp(10))
    write_clip(tmp_path / "b.mp4", ramp(11))
    (tmp_path / "c.mp4").write_bytes((tmp_path / "a.mp4").read_bytes())
    prints = [Clip(tmp_path / f"{name}.mp4", name).fingerprint() for name in "abc"]
    assert prints[0] == prints[2] != prints[1]
    assert Clip(tmp_path / "a.mp4", "a", count=8).fingerprint() != prints[0]
