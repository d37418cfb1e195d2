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
    """The HTML text of the page; without `data`, all that a server would answer, it asks the server it came from."""
    policy, data_block = "", ""
    if data is not None:
        # Without `<`, the data cannot close the script element.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        data_block = f'<script type="application/json" id="data">{text}</script>'
        policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy()}">'
    icon = f"data:image/svg+xml;base64,{_base64((STATIC / 'icon.svg').read_bytes())}"
    parts = {"title": html.escape(title), "policy": policy, "data": data_block, "icon": icon, **_sources()}
    template = (STATIC / "index.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def content_policy(connect: str = "'none'") -> str:
    """A Content-Security-Policy that allows only the page's own scripts and styles, by their hashes."""
    hashes = {name: f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for name, text in _sources().items()}
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


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
