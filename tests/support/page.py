"""HTML pages taken apart: elements, and addresses that a browser would ask for."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any

ADDRESSES = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tags: how many elements there are of each name.
        addresses: values of attributes that a browser may fetch.
        handlers: attributes that would run a script.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._data: list[str] = []
        self._is_data = False
        self.feed(text)
        self.close()

    @property
    def data(self) -> dict[str, Any]:
        """Everything that a server would have answered."""
        return json.loads("".join(self._data))

    def chart(self, name: str, run: str | None = None) -> dict[str, Any]:
        """A chart of the first run, of another, or of the comparison."""
        data = self.data
        panels = [
            *([data["comparison"]] if data["comparison"] else []),
            *data["panels"][run or data["runs"][0]["name"]],
        ]
        return next(chart for panel in panels for chart in panel["charts"] if chart["name"] == name)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags[tag] += 1
        self._is_data = ("id", "data") in attrs
        for name, value in attrs:
            self.addresses += [value or ""] if name in ADDRESSES else []
            self.handlers += [name] if name.startswith("on") else []

    def handle_data(self, data: str) -> None:
        """Note the page's data."""
        self._data += [data] if self._is_data else []
        self._is_data = False
