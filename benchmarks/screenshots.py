"""Makes the pictures of docs/dashboard.md from a run folder.

`python -m benchmarks.screenshots runs/smollm2-gym` starts `spo dashboard` within this process, opens it in headless
Chromium and writes docs/dashboard*.png, with few colours so that they are small.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from benchmarks import options
from common.errors import reports_user_errors
from tests.support.chromium import chromium
from tests.support.dashboard import Dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = 240


def opened(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    """A page at a place, when all of what it shows is drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("[data-drawn], .list li[data-at]")
    page.wait_for_function("!document.querySelector('#runs').textContent.includes('reading')")
    return page


def save(page: Page, name: str) -> None:
    """Write what is on the screen."""
    page.wait_for_timeout(500)  # the charts' next frame
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(DOCS / name, optimize=True)
    page.context.close()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("run", type=options.folder)
    args = parser.parse_args()
    with Dashboard([args.run]) as server, chromium() as browser:
        save(opened(browser, f"{server.url}#/charts", 1240, 880, "light"), "dashboard.png")
        page = opened(browser, f"{server.url}#/charts", 1240, 700, "light")
        page.locator('[data-panel="tracker"]').evaluate("panel => panel.scrollIntoView()")
        save(page, "dashboard-tracker.png")
        page = opened(browser, f"{server.url}#/episodes", 1240, 900, "dark")
        page.get_by_label("Kind").select_option("with tokens")
        page.get_by_label("Order").select_option("oldest first")
        page.get_by_label("Reward to").fill("0")
        page.locator(".pager", has_text=" of ").wait_for()
        page.locator("#episode-4").click()
        page.locator(".tokens").wait_for()
        save(page, "dashboard-episodes.png")
        save(opened(browser, f"{server.url}#/charts", 360, 700, "dark"), "dashboard-narrow.png")


if __name__ == "__main__":
    main()
