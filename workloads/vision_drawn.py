"""Questions about pictures of our own, with known answers, for machines that reach no benchmark.

They are not MathVista and are labelled so. One seed and split give the same pictures everywhere,
and a longer list begins with the shorter one. They come in sizes that take different grids of
tiles, and in every kind of answer MathVista has: a choice, an integer, a decimal, a list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from workloads.vision_asked import Asked, draw_questions
from workloads.vision_media import Kind, Pixels
from workloads.vision_questions import Question
from workloads.vision_shapes import (
    COLOURS,
    SHAPES,
    BarChart,
    Drawing,
    Item,
    NumberLine,
    Scene,
)

_SIZES = ((96, 96), (160, 112), (112, 176), (240, 96), (200, 200))


@dataclass(frozen=True)
class Drawn:
    """A picture made from its description."""

    name: str
    drawing: Drawing
    kind: Kind = "image"
    count: int = 1

    def fingerprint(self) -> str:
        """Hash of the description."""
        return hashlib.sha256(repr(self.drawing).encode()).hexdigest()

    def exists(self) -> bool:
        """It is always there."""
        return True

    def check(self) -> None:
        """See :class:`~workloads.vision_media.Media`; there is nothing to look for."""

    def frames(self) -> list[Pixels]:
        """See :class:`~workloads.vision_media.Media`."""
        return [self.drawing.draw()]


def asked_pictures(split: str, *, count: int, seed: int) -> list[Asked[Drawing]]:
    """``count`` questions about pictures.

    Raises:
        ValueError: an unknown split.
    """
    return draw_questions("pictures", _TASKS, split, count=count, seed=seed)


def _count(rng: random.Random) -> Asked[Drawing]:
    items, size = _items(rng, rng.randint(3, 8))
    one = rng.choice(items)
    number = sum(i.shape == one.shape and i.colour == one.colour for i in items)
    text = f"How many {one.colour} {one.shape}s are in the picture?"
    return Asked(Scene(*size, items), Question(text, str(number), "integer"), "count")


def _colour(rng: random.Random) -> Asked[Drawing]:
    items, size = _items(rng, 3, distinct=True)
    one = rng.choice(items)
    choices = _choices(rng, one.colour, list(COLOURS))
    text = f"Which colour is the {one.shape}?"
    return Asked(Scene(*size, items), Question(text, one.colour, "text", choices), "colour")


def _position(rng: random.Random) -> Asked[Drawing]:
    items, size = _items(rng, 3, distinct=True)
    edge, word = rng.choice([(min, "furthest left"), (max, "furthest right")])
    one = edge(items, key=lambda item: item.x)
    choices = _choices(rng, one.shape, list(SHAPES))
    text = f"Which shape is {word}?"
    return Asked(Scene(*size, items), Question(text, one.shape, "text", choices), "position")


def _bar(rng: random.Random) -> Asked[Drawing]:
    chart = _chart(rng)
    i = rng.randrange(len(chart.names))
    text = f"What is the value of bar {chart.names[i]}?"
    return Asked(chart, Question(text, str(chart.values[i]), "integer"), "bar")


def _difference(rng: random.Random) -> Asked[Drawing]:
    chart = _chart(rng)
    answer = max(chart.values) - min(chart.values)
    text = "How much higher is the highest bar than the lowest one?"
    return Asked(chart, Question(text, str(answer), "integer"), "difference")


def _all_bars(rng: random.Random) -> Asked[Drawing]:
    chart = _chart(rng)
    text = "What are the values of the bars, from left to right?"
    return Asked(chart, Question(text, str(list(chart.values)), "list"), "bars")


def _arrow(rng: random.Random) -> Asked[Drawing]:
    top = rng.randint(4, 9)
    line = NumberLine(
        rng.randint(150, 280), rng.randint(80, 120), top, rng.randint(5, 10 * top - 5)
    )
    question = Question(
        "At which number does the arrow point?", f"{line.tenths / 10:.1f}", "float", precision=1
    )
    return Asked(line, question, "arrow")


_TASKS: tuple[Callable[[random.Random], Asked[Drawing]], ...] = (
    _count,
    _colour,
    _bar,
    _arrow,
    _position,
    _difference,
    _all_bars,
)


def _items(
    rng: random.Random, count: int, *, distinct: bool = False
) -> tuple[tuple[Item, ...], tuple[int, int]]:
    """Shapes in cells of a grid, so that none hides another, and the size of the picture."""
    width, height = rng.choice(_SIZES)
    columns = 4
    rows = -(-count // columns) + 1
    cells = rng.sample(range(rows * columns), count)
    if distinct:  # not two in a column either: left and right shall be clear
        cells = [
            column + columns * rng.randrange(rows) for column in rng.sample(range(columns), count)
        ]
    shapes = rng.sample(SHAPES, count) if distinct else rng.choices(SHAPES[:2], k=count)
    colours = (
        rng.sample(list(COLOURS), count) if distinct else rng.choices(list(COLOURS)[:2], k=count)
    )
    cell = (width // columns, height // rows)
    items = tuple(
        Item(
            shape,
            colour,
            cell[0] * (at % columns) + cell[0] // 2,
            cell[1] * (at // columns) + cell[1] // 2,
            min(cell) * 2 // 5,
        )
        for shape, colour, at in zip(shapes, colours, cells, strict=True)
    )
    return items, (width, height)


def _chart(rng: random.Random) -> BarChart:
    count, top = rng.randint(3, 5), rng.randint(6, 10)
    values = tuple(rng.randint(1, top) for _ in range(count))
    return BarChart(
        rng.randint(140, 240), rng.randint(110, 190), tuple("ABCDE"[:count]), values, top
    )


def _choices(rng: random.Random, answer: str, others: list[str]) -> tuple[str, ...]:
    wrong = rng.sample([name for name in others if name != answer], 3)
    choices = [answer, *wrong]
    rng.shuffle(choices)
    return tuple(choices)
