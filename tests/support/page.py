"""HTML pages taken apart: elements, the text that is seen, and addresses that are asked for."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

INSIDE_ONLY = ("svg", "style", "title")
ADDRESSES = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")
VOID = ("meta", "br", "hr", "img", "link", "input", "use", "path")


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tags: how many elements there are of each name.
        addresses: values of attributes that a browser may fetch.
        handlers: attributes that would run a script.
        ids: of all elements.
        seen: text outside of pictures and styles.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.ids: list[str] = []
        self._texts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    @property
    def seen(self) -> str:
        """The text of the page."""
        return "".join(self._texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags[tag] += 1
        if tag in INSIDE_ONLY:
            self._inside.append(tag)
        for name, value in attrs:
            self.addresses += [value or ""] if name in ADDRESSES else []
            self.handlers += [name] if name.startswith("on") else []
            self.ids += [value or ""] if name == "id" else []

    def handle_endtag(self, tag: str) -> None:
        """Note its end."""
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        """Note text."""
        if not self._inside:
            self._texts.append(data)
