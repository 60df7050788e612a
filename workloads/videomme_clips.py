"""Questions about clips of our own, with known answers, for machines that reach no benchmark.

They are not Video-MME and are labelled so. One seed and split give the same clips everywhere, and a
longer list begins with the shorter one. What is asked cannot be seen in a single frame: where
something goes, what comes first, how many things come by, what changes its colour.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from workloads.vision_asked import Asked, draw_questions
from workloads.vision_media import Kind, Pixels
from workloads.vision_questions import Question
from workloads.vision_shapes import COLOURS, SHAPES, Item, Scene, Shape
from workloads.vision_video import FRAMES, sample_evenly

LENGTH = 64  # frames of a clip
SIZES = ((96, 72), (80, 80), (72, 96))
_STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Track:
    """A shape that is there in ``frames`` (first, end) and moves on by ``step`` pixels a frame."""

    item: Item
    frames: tuple[int, int] = (0, LENGTH)
    step: tuple[float, float] = (0.0, 0.0)

    def at(self, frame: int) -> Item | None:
        """The shape as it is in ``frame``."""
        first, end = self.frames
        if not first <= frame < end:
            return None
        x = self.item.x + round(self.step[0] * (frame - first))
        y = self.item.y + round(self.step[1] * (frame - first))
        return Item(self.item.shape, self.item.colour, x, y, self.item.size)


@dataclass(frozen=True)
class Film:
    """Tracks over ``LENGTH`` frames."""

    width: int
    height: int
    tracks: tuple[Track, ...]

    def frame(self, number: int) -> Pixels:
        """One picture."""
        items = tuple(item for track in self.tracks if (item := track.at(number)) is not None)
        return Scene(self.width, self.height, items).draw()


@dataclass(frozen=True)
class DrawnClip:
    """A clip made from its description; ``count`` of its frames are sampled as from a file."""

    name: str
    film: Film
    count: int = FRAMES
    kind: Kind = "video"

    def fingerprint(self) -> str:
        """Hash of the description."""
        return hashlib.sha256(f"{self.count} {self.film!r}".encode()).hexdigest()

    def exists(self) -> bool:
        """It is always there."""
        return True

    def check(self) -> None:
        """See :class:`~workloads.vision_media.Media`; there is nothing to look for."""

    def frames(self) -> list[Pixels]:
        """See :class:`~workloads.vision_media.Media`."""
        return sample_evenly([self.film.frame(i) for i in range(LENGTH)], self.count)


def asked_clips(split: str, *, count: int, seed: int) -> list[Asked[Film]]:
    """``count`` questions about clips.

    Raises:
        ValueError: an unknown split.
    """
    return draw_questions("clips", _TASKS, split, count=count, seed=seed)


def _motion(rng: random.Random) -> Asked[Film]:
    width, height = rng.choice(SIZES)
    way = rng.choice(list(_STEPS))
    dx, dy = _STEPS[way]
    speed = rng.choice((0.5, 0.7, 0.9))
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    start = (width // 2 - dx * width // 3, height // 2 - dy * height // 3)
    mover = Track(Item(shape, colour, *start, 8), step=(dx * speed, dy * speed))
    question = _asked(rng, f"Which way does the {shape} move?", way, list(_STEPS), 4)
    return Asked(Film(width, height, (mover,)), question, "motion")


def _order(rng: random.Random) -> Asked[Film]:
    width, height = rng.choice(SIZES)
    colours = rng.sample(list(COLOURS), 4)
    part = LENGTH // len(colours)
    shape = rng.choice(SHAPES)
    tracks = tuple(
        Track(Item(shape, colour, width // 2, height // 2, 14), (i * part, (i + 1) * part))
        for i, colour in enumerate(colours)
    )
    place = rng.randrange(len(colours))
    word = ("first", "second", "third", "last")[place]
    question = _asked(rng, f"Which colour is shown {word}?", colours[place], colours, 4)
    return Asked(Film(width, height, tracks), question, "order")


def _number(rng: random.Random) -> Asked[Film]:
    width, height = rng.choice(SIZES)
    number = rng.randint(2, 6)
    shape: Shape = rng.choice(SHAPES)
    part = LENGTH // number
    tracks = tuple(
        Track(
            Item(
                shape,
                rng.choice(list(COLOURS)),
                rng.randrange(16, width - 16),
                rng.randrange(16, height - 16),
                10,
            ),
            (i * part, (i + 1) * part - 2),
        )
        for i in range(number)
    )
    choices = [str(n) for n in range(1, 8)]
    question = _asked(rng, f"How many {shape}s appear, one after another?", str(number), choices, 4)
    return Asked(Film(width, height, tracks), question, "count")


def _change(rng: random.Random) -> Asked[Film]:
    width, height = rng.choice(SIZES)
    before, after = rng.sample(list(COLOURS), 2)
    shapes = rng.sample(SHAPES, 3)
    turn = rng.randrange(LENGTH // 4, 3 * LENGTH // 4)
    tracks, changing = [], rng.choice(shapes)
    for i, shape in enumerate(shapes):
        x = width * (2 * i + 1) // 6
        still = Item(shape, before, x, height // 2, 9)
        if shape != changing:
            tracks.append(Track(still))
        else:
            tracks += [
                Track(still, (0, turn)),
                Track(Item(shape, after, x, height // 2, 9), (turn, LENGTH)),
            ]
    question = _asked(rng, "Which shape changes its colour?", changing, list(SHAPES), 4)
    return Asked(Film(width, height, tuple(tracks)), question, "change")


_TASKS: tuple[Callable[[random.Random], Asked[Film]], ...] = (_motion, _order, _number, _change)


def _asked(rng: random.Random, text: str, answer: str, pool: list[str], count: int) -> Question:
    """A question with ``count`` choices out of ``pool``."""
    choices = [answer, *rng.sample([name for name in pool if name != answer], count - 1)]
    rng.shuffle(choices)
    return Question(text, answer, "text", tuple(choices))
