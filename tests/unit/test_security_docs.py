"""docs/security.md promises nothing that no test tries."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def section(title: str) -> list[str]:
    """Rows of the table below a heading, without its head."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"]
    return rows[2:]


def test_every_defence_names_a_test() -> None:
    rows = section("What is defended")
    assert len(rows) > 10
    assert [row for row in rows if not NAMED.search(row)] == []


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall((ROOT / "docs/security.md").read_text(encoding="utf-8"))
    assert [
        (file, name) for file, name in named if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ] == []
