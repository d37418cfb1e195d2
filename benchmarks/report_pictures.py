"""Pictures of `spo report` and `spo compare` for the documentation, by headless Chromium, from run folders of your own.

    for seed in 0 1 2; do spo quickstart --seed $seed; done
    python -m benchmarks.report_pictures runs/quickstart-1 runs/quickstart-2 runs/quickstart-3 -o docs/

Writes report.png, of the first run, and compare.png, of all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import options
from common.errors import reports_user_errors
from launcher.compare.comparison import compared
from launcher.compare.comparison import page as comparison_page
from launcher.report.run_data import read_run
from launcher.report.run_report import report
from tests.support.chromium import chromium

WIDTH, HEIGHT = 1100, 1110  # of a picture, in CSS pixels


def photograph(pages: dict[Path, str], width: int = WIDTH, height: int = HEIGHT) -> None:
    """Write a picture of the upper part of each page, light, by the picture's path."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        window = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        for path, text in pages.items():
            file = Path(folder) / "page.html"
            file.write_text(text, encoding="utf-8")
            window.goto(file.as_uri())
            window.screenshot(path=path)


@reports_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments and write the pictures."""
    parser = options.Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=options.folder, help="run folders")
    parser.add_argument("-o", "--output", type=options.folder, default=Path("docs"), help="folder for the pictures")
    args = parser.parse_args(arguments)
    runs = [read_run(folder) for folder in args.folders]
    pages = {args.output / "report.png": report(runs[0])}
    if len(runs) > 1:
        pages[args.output / "compare.png"] = comparison_page(compared(runs, [], None))
    photograph(pages)


if __name__ == "__main__":
    main()
