"""Runs the cells of a notebook as Jupyter does, beside a running event loop: `python -m tests.support.notebook FILE`.

It prints what each cell of code prints and shows, as JSON.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


async def run_cells(path: Path) -> list[str]:
    """What each cell of code printed, and then showed."""
    cells = json.loads(path.read_text())["cells"]
    space: dict[str, Any] = {"__name__": "__main__"}
    return [_run(ast.parse("".join(cell["source"])), space) for cell in cells if cell["cell_type"] == "code"]


def _run(code: ast.Module, space: dict[str, Any]) -> str:
    last = code.body.pop() if isinstance(code.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "<cell>", "exec"), space)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
    shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
    return printed.getvalue() + ("" if last is None else shown)


if __name__ == "__main__":
    json.dump(asyncio.run(run_cells(Path(sys.argv[1]))), sys.stdout)
