"""Builds the page as one HTML text that includes styles, scripts and, if it is saved, its data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
STYLES = ("uplot/uPlot.min.css", "base.css", "charts.css", "episodes.css")
FIRST = ("early.js", "uplot/uPlot.iife.min.js")  # classic scripts; the first runs before anything is painted
MODULES = (
    "address.js", "dom.js", "data.js", "charts.js", "tables.js", "tokens.js", "episode.js", "pairs.js", "episodes.js",
    "panels.js", "main.js",
)  # fmt: skip


def page_html(title: str = "SPO runs", data: dict[str, Any] | None = None) -> str:
    """The HTML text of the page.

    Args:
        data: everything that a server would answer; without it the page asks the server it came from.
    """
    policy, data_block = "", ""
    if data is not None:
        # Without `<`, the data cannot close the script element.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        data_block = f'<script type="application/json" id="data">{text}</script>'
        policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy()}">'
    parts = {"title": html.escape(title), "policy": policy, "data": data_block, "icon": _icon(), **_sources()}
    template = (STATIC / "index.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def content_policy(connect: str = "'none'") -> str:
    """A Content-Security-Policy that allows only the page's own scripts and styles, by their hashes."""
    sources = _sources()
    hashes = {name: f"'sha256-{_hash(sources[name])}'" for name in ("style", "early", "uplot", "script")}
    scripts = " ".join(hashes[name] for name in ("early", "uplot", "script"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {hashes['style']}; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _sources() -> dict[str, str]:
    """The page's style and scripts; the modules are joined into one, each after those it imports."""
    style, (early, uplot) = "\n".join(map(_read, STYLES)), map(_read, FIRST)
    modules = "\n".join(map(_read, MODULES))
    script = re.sub(r"^import .*\n|^export ", "", modules, flags=re.MULTILINE)
    return {"style": style, "early": early, "uplot": uplot, "script": script}


def _icon() -> str:
    return "data:image/svg+xml;base64," + base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
