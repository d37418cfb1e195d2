"""Makes the pictures of docs/dashboard.md from run folders, by headless Chromium.

    for seed in 0 1 2; do spo quickstart --seed $seed; done
    python -m benchmarks.screenshots runs/quickstart-1 runs/quickstart-2 runs/quickstart-3

Writes docs/dashboard*.png of the first run, as the server shows it, docs/report.png of its saved page, and
docs/compare.png of the saved page of all; with few colours, so that they are small.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from benchmarks import options
from common.errors import reports_user_errors
from launcher.compare import compared, comparison_panel
from launcher.folder.run import read_one
from launcher.page.saved import save
from tests.support.chromium import chromium
from tests.support.dashboard import Dashboard

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COLOURS = 240


def opened(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    """A page at a place, when all of what it shows is drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("[data-drawn], .list li[data-at]")
    page.wait_for_function("!document.querySelector('#runs').textContent.includes('reading')")
    return page


def scrolled(page: Page, panel: str) -> Page:
    """The same with a panel at its top."""
    page.locator(f'[data-panel="{panel}"]').evaluate("panel => panel.scrollIntoView()")
    return page


def photograph(page: Page, path: Path) -> None:
    """Write a picture of what is on the screen."""
    page.wait_for_timeout(500)  # the charts' next frame
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    page.context.close()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=options.folder, help="run folders")
    parser.add_argument("-o", "--output", type=options.folder, default=Path("docs"), help="folder for the pictures")
    args = parser.parse_args()
    runs, to = [read_one(folder) for folder in args.folders], args.output
    with tempfile.TemporaryDirectory() as scratch, Dashboard(args.folders[:1]) as server, chromium() as browser:
        charts = f"{server.url}#/charts"
        photograph(scrolled(opened(browser, charts, 1240, 880, "light"), "reward"), to / "dashboard.png")
        photograph(scrolled(opened(browser, charts, 1240, 700, "light"), "tracker"), to / "dashboard-tracker.png")
        photograph(opened(browser, charts, 360, 700, "dark"), to / "dashboard-narrow.png")
        page = opened(browser, f"{server.url}#/episodes", 1240, 900, "dark")
        page.get_by_label("Kind").select_option("with tokens")
        page.get_by_role("textbox", name="Reward").fill("<1")
        page.locator(".pager", has_text=" of ").wait_for()
        page.locator("#episode-0").click()
        page.locator(".tokens").wait_for()
        photograph(page, to / "dashboard-episodes.png")

        file = Path(scratch) / "page.html"
        save(file, f"Report of {runs[0].name}", runs[:1])
        photograph(opened(browser, file.as_uri(), 1100, 1110, "light"), to / "report.png")
        if len(runs) > 1:
            save(file, f"{len(runs)} runs compared", runs, comparison_panel(compared(runs, [], None)))
            photograph(opened(browser, file.as_uri(), 1100, 1110, "light"), to / "compare.png")


if __name__ == "__main__":
    main()
