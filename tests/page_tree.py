"""A page as a tree, read by a parser that is not ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str = "", class_: str = "") -> list[Node]:
        return [
            node
            for node in self.walk()
            if (not tag or node.tag == tag) and (not class_ or class_ in node.classes)
        ]

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        parts = (child if isinstance(child, str) else child.text for child in self.children)
        return " ".join(" ".join(parts).split())


class PageTree(HTMLParser):
    """Raises AssertionError where an element is not closed as it was opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self._open = [self.root]
        self.feed(page)
        self.close()
        assert len(self._open) == 1, [node.tag for node in self._open]

    def by_id(self, name: str) -> Node:
        (found,) = [node for node in self.root.walk() if node.attributes.get("id") == name]
        return found

    def ids(self) -> list[str]:
        return [node.attributes["id"] for node in self.root.walk() if "id" in node.attributes]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)
