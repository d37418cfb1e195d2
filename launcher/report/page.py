"""Pages: self-contained HTML from a template, in which every value is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import visible
from launcher.report.curves import Chart
from launcher.report.drawing import THEME, svg
from launcher.run.pace import duration

FOLDER = Path(__file__).parent / "templates"


def render(template: str, charts: Iterable[Chart], **values: Any) -> str:
    """A page.

    Args:
        template: its file in `templates/`.
        charts: drawn into the page as `charts`, each with `name`, `title`, `note` and `svg`.
        values: of the template. Texts are shown as they are, whatever stands in them: HTML is escaped, and so are
            control characters, which a browser would not show.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent, "signed": signed, "number": number, "count": count, "duration": duration,
        "value": setting,
    }  # fmt: skip
    drawn = [{"name": c.name, "title": c.title, "note": c.note, "svg": Markup(svg(c))} for c in charts]
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in THEME.items()) for i in (0, 1))
    theme = {"light": Markup(light), "dark": Markup(dark), "style": Markup((FOLDER / "style.css").read_text())}
    return environment.get_template(template).render(charts=drawn, theme=theme, **values)


def percent(share: float | None) -> str:
    """A share as people read it."""
    return "–" if share is None or math.isnan(share) else f"{share:.1%}"


def signed(share: float) -> str:
    """A difference of two shares, in percentage points."""
    return f"{100 * share:+.1f}".replace("-", "−")


def number(value: float | None) -> str:
    """A number with four digits."""
    return "–" if value is None or math.isnan(value) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def count(value: float) -> str:
    """A number of things: those of a million and more in short."""
    if value < 1e6:
        return f"{value:,.0f}"
    power = min(3, int(math.log10(value)) // 3 - 1)
    return f"{value / 1000 ** (power + 1):.3g} {['', 'million', 'billion', 'trillion'][power]}"


def setting(value: Any) -> str:
    """A value of the configuration, as YAML and people write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
