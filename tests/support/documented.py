"""Code and configuration as the documentation shows them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.with_name("examples")


def section(document: str, title: str) -> str:
    """The text under a heading of level 2."""
    text = (DOCS / document).read_text(encoding="utf-8")
    assert f"\n## {title}\n" in text, title
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(document: str, title: str, language: str) -> list[str]:
    """The code blocks of a language in a section."""
    return re.findall(rf"```{language}\n(.*?)```", section(document, title), re.DOTALL)


def modules(document: str) -> dict[str, str]:
    """Files of a document's Python examples, whose first line names them."""
    text = (DOCS / document).read_text(encoding="utf-8")
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))
