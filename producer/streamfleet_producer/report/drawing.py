"""Elements of a page and of its plots; what is text is escaped where it is written out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

MARKERS = ("circle", "square", "diamond", "triangle", "ring", "cross")
"""A series is told by its shape also, for who cannot tell its colour."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
CHAR_PX = 6.9
"""A character at the size of the plots, of a font that is rather wide."""
# XML has no place for them, not even escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def element(tag: str, *inside: Element | str | None, **attributes: str | float) -> Element:
    """An element with what it holds; `class_` is the attribute class, and `_` in a name stands for `-`."""
    named = {
        ("class" if name == "class_" else name.replace("_", "-")): _clean(
            value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        )
        for name, value in attributes.items()
    }
    made = Element(tag, named)
    last: Element | None = None
    for part in inside:
        if part is None:
            continue
        if not isinstance(part, str):
            made.append(part)
            last = part
        elif last is None:
            made.text = (made.text or "") + _clean(part)
        else:
            last.tail = (last.tail or "") + _clean(part)
    return made


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def path(points: Iterable[tuple[float, float]]) -> str:
    """A line through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def marker(at: tuple[float, float], colour: int, *, size: float = 4.0, title: str = "") -> Element:
    """One mark of a series; what it says under a pointer is `title`."""
    (x, y), shape = at, MARKERS[colour]
    attributes = {"class_": f"mark s{colour}"}
    inside = element("title", title) if title else None
    if shape == "circle":
        return element("circle", inside, cx=x, cy=y, r=size, **attributes)
    if shape == "ring":
        return element("circle", inside, cx=x, cy=y, r=size - 0.8, class_=f"mark ring t{colour}")
    half = size * 0.9
    corners: Sequence[tuple[float, float]]
    if shape == "square":
        corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
    elif shape == "diamond":
        corners = [(0, -size * 1.25), (size * 1.25, 0), (0, size * 1.25), (-size * 1.25, 0)]
    elif shape == "triangle":
        corners = [(0, -size * 1.1), (size * 1.1, size * 0.9), (-size * 1.1, size * 0.9)]
    else:
        a, b = size * 1.1, size * 0.4
        corners = [(-a, -b), (-b, -b), (-b, -a), (b, -a), (b, -b), (a, -b)]
        corners += [(a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b)]
    outline = path([(x + dx, y + dy) for dx, dy in corners]) + "Z"
    return element("path", inside, d=outline, **attributes)


def key(colour: int) -> Element:
    """A series' mark and line, for a legend beside text."""
    return element(
        "svg",
        element("line", x1=1, y1=6, x2=27, y2=6, class_=f"line t{colour}", stroke_dasharray=DASHES[colour]),
        marker((14, 6), colour),
        class_="key",
        viewBox="0 0 28 12",
        aria_hidden="true",
    )


class Plot:
    """A plot's frame: its size, the room for labels, and what stands on its axes.

    `name` makes ids, and has to be another for each plot of a page.
    """

    def __init__(
        self,
        name: str,
        title: str,
        description: str,
        size: tuple[float, float],
        *,
        left: float = 40,
        right: float = 12,
        top: float = 8,
        bottom: float = 34,
    ) -> None:
        self.width, self.height = size
        self.x0, self.x1 = left, self.width - right
        self.y0, self.y1 = self.height - bottom, top
        self.svg = element(
            "svg",
            element("title", title, id=f"{name}-title"),
            element("desc", description, id=f"{name}-desc"),
            id=name,
            class_="plot",
            role="img",
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            aria_labelledby=f"{name}-title {name}-desc",
        )

    def add(self, *parts: Element) -> None:
        self.svg.extend(parts)

    def x(self, place: float) -> float:
        """Where 0 to 1 is from left to right."""
        return self.x0 + (self.x1 - self.x0) * place

    def y(self, place: float) -> float:
        """Where 0 to 1 is from the bottom to the top."""
        return self.y0 + (self.y1 - self.y0) * place

    def x_axis(self, ticks: Sequence[tuple[float, str]], title: str) -> None:
        """Ticks with their texts, of which those are left out that would touch their neighbours."""
        free_from = -1e9
        for place, text in ticks:
            x, half = self.x(place), len(text) * CHAR_PX / 2
            self.add(element("line", x1=x, x2=x, y1=self.y0, y2=self.y1, class_="grid"))
            # The last one may not leave the picture.
            at = min(max(x, half), self.width - half)
            if at - half >= free_from:
                self.add(element("text", text, x=at, y=self.y0 + 14, text_anchor="middle", class_="tick"))
                free_from = at + half + CHAR_PX
        middle = (self.x0 + self.x1) / 2
        self.add(element("text", title, x=middle, y=self.y0 + 29, text_anchor="middle", class_="axis"))
        self.add(element("line", x1=self.x0, x2=self.x1, y1=self.y0, y2=self.y0, class_="base"))

    def y_axis(self, ticks: Sequence[tuple[float, str]]) -> None:
        """Ticks with their texts."""
        for place, text in ticks:
            y = self.y(place)
            self.add(
                element("line", x1=self.x0, x2=self.x1, y1=y, y2=y, class_="grid"),
                element("text", text, x=self.x0 - 6, y=y + 4, text_anchor="end", class_="tick"),
            )
