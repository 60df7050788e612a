"""What our own pictures are made of: coloured shapes, bar charts, number lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from PIL import Image, ImageDraw

from workloads.vision_media import Pixels

Shape = Literal["circle", "square", "triangle", "star"]
SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (214, 39, 40),
    "blue": (31, 92, 196),
    "green": (30, 140, 60),
    "yellow": (240, 200, 20),
    "purple": (130, 60, 170),
    "black": (20, 20, 20),
}
_PAPER = (250, 250, 248)
_INK = (40, 40, 40)


class Drawing(Protocol):
    """A description of a picture; equal descriptions give equal pixels."""

    def draw(self) -> Pixels:
        """The picture."""
        ...


@dataclass(frozen=True)
class Item:
    """A shape of one colour around ``(x, y)``, ``size`` pixels from its middle to its edge."""

    shape: Shape
    colour: str
    x: int
    y: int
    size: int


@dataclass(frozen=True)
class Scene:
    """Shapes on paper; later ones lie on top."""

    width: int
    height: int
    items: tuple[Item, ...]

    def draw(self) -> Pixels:
        """See :class:`Drawing`."""
        image, pen = _paper(self.width, self.height)
        for item in self.items:
            _draw_item(pen, item)
        return np.asarray(image)


@dataclass(frozen=True)
class BarChart:
    """One bar per name with its value, over a scale from 0 to ``top`` with lines at every unit."""

    width: int
    height: int
    names: tuple[str, ...]
    values: tuple[int, ...]
    top: int

    def draw(self) -> Pixels:
        """See :class:`Drawing`."""
        image, pen = _paper(self.width, self.height)
        left, right, ceiling, floor = 24, self.width - 8, 8, self.height - 18
        for unit in range(self.top + 1):
            y = floor - unit * (floor - ceiling) // self.top
            pen.line((left, y, right, y), fill=(205, 205, 205))
            pen.text((4, y - 6), str(unit), fill=_INK)
        step = (right - left) // len(self.names)
        colours = list(COLOURS.values())
        for i, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            x = left + i * step + step // 4
            y = floor - value * (floor - ceiling) // self.top
            pen.rectangle((x, y, x + step // 2, floor), fill=colours[i % len(colours)])
            pen.text((x + step // 4 - 3, floor + 3), name, fill=_INK)
        return np.asarray(image)


@dataclass(frozen=True)
class NumberLine:
    """A line from 0 to ``top`` with a mark at every unit and an arrow at ``tenths / 10``."""

    width: int
    height: int
    top: int
    tenths: int

    def draw(self) -> Pixels:
        """See :class:`Drawing`."""
        image, pen = _paper(self.width, self.height)
        left, right, y = 14, self.width - 14, self.height * 2 // 3
        pen.line((left, y, right, y), fill=_INK, width=2)
        for unit in range(self.top + 1):
            x = left + unit * (right - left) // self.top
            pen.line((x, y - 5, x, y + 5), fill=_INK)
            pen.text((x - 3, y + 8), str(unit), fill=_INK)
        x = left + self.tenths * (right - left) // (10 * self.top)
        pen.polygon([(x, y - 2), (x - 6, y - 16), (x + 6, y - 16)], fill=COLOURS["red"])
        pen.line((x, y - 34, x, y - 12), fill=COLOURS["red"], width=3)
        return np.asarray(image)


def _paper(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (width, height), _PAPER)
    return image, ImageDraw.Draw(image)


def _draw_item(pen: ImageDraw.ImageDraw, item: Item) -> None:
    x, y, size, fill = item.x, item.y, item.size, COLOURS[item.colour]
    if item.shape == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=fill)
    elif item.shape == "square":
        pen.rectangle((x - size, y - size, x + size, y + size), fill=fill)
    elif item.shape == "triangle":
        pen.polygon(_corners(x, y, (size,) * 3), fill=fill)
    else:
        pen.polygon(_corners(x, y, (size, size * 0.4) * 5), fill=fill)


def _corners(x: int, y: int, radii: Sequence[float]) -> list[tuple[float, float]]:
    """Points around ``(x, y)``, the first one on top."""
    turns = [2 * math.pi * i / len(radii) for i in range(len(radii))]
    return [
        (x + r * math.sin(turn), y - r * math.cos(turn))
        for r, turn in zip(radii, turns, strict=True)
    ]
