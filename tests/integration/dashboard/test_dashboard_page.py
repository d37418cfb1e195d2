"""The dashboard in a browser: every panel live and from a folder, a server started again, text of strangers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from launcher.dashboard import watch
from tests.support.dashboard import CONFIG, PANELS, Dashboard, begin_run, full_run, write_episodes, write_step
from tests.support.episode_rows import keep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAWN = '[data-panel="{}"] [data-chart]:not([hidden])'
Open = Callable[..., "Page"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL", 0.1)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens pages; afterwards no page has asked for anything elsewhere, and none had an error."""
    contexts = []
    elsewhere: list[str] = []
    errors: list[str] = []

    def open_page(
        server: Dashboard, view: str = "charts", width: int = 1200, query: str = "", **options: object
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(180_000)

        def asked(url: str) -> None:
            if urlsplit(url).scheme != "data" and urlsplit(url).netloc != f"127.0.0.1:{server.port}":
                elsewhere.append(url)

        page.on("request", lambda request: asked(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
        page.goto(f"{server.url}{query}#/{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert elsewhere == []
    assert errors == []


def drawn_panels(page: Page) -> set[str]:
    """Panels with at least one chart or table in them."""
    return {name for name in PANELS if page.locator(DRAWN.format(name)).count()}


def test_every_panel_is_drawn_from_a_folder(tmp_path: Path, opened: Open) -> None:
    with Dashboard([full_run(tmp_path / "mine")]) as server:
        page = opened(server)
        page.locator('[data-panel="configuration"]').wait_for()

        assert drawn_panels(page) == set(PANELS)
        for card in page.locator("[data-chart]").all():
            card.scroll_into_view_if_needed()
            card.locator("canvas, table").first.wait_for()
        assert page.locator(".cards > .missing p").count() == 0
        assert page.locator('[data-chart="reward"] .legend').inner_text().split() == ["mean", "0.44"]
        assert "bottleneck" in page.locator('[data-panel="throughput"] .words').inner_text()


def test_panels_come_and_change_while_the_run_goes_on(tmp_path: Path, opened: Open) -> None:
    folder = begin_run(tmp_path / "mine")
    with Dashboard([folder]) as server:
        page = opened(server)
        page.locator('[data-panel="reward"]').wait_for()
        assert drawn_panels(page) == {"configuration"}
        assert page.locator('[data-panel="reward"] .missing p').count() > 0

        write_step(folder, 5, reward=0.5)
        write_episodes(folder)
        for name in set(PANELS) - {"configuration"}:
            page.locator(DRAWN.format(name)).first.wait_for()

        write_step(folder, 6, reward=0.75)
        page.locator('[data-chart="reward"] .legend b', has_text="0.75").wait_for()
        page.locator(".run-figures", has_text="6 / 40 steps").wait_for()


def test_a_page_goes_on_after_the_server_was_started_again(tmp_path: Path, opened: Open) -> None:
    folder = full_run(tmp_path / "mine")
    with Dashboard([folder]) as server:
        page = opened(server)
        page.locator(".connection.live").wait_for()
        server.stop()
        page.locator(".connection.lost").wait_for()

        write_step(folder, 13, reward=0.99)
        server.start()

        page.locator('[data-chart="reward"] .legend b', has_text="0.99").wait_for()
        page.locator(".connection.live").wait_for()


def test_a_run_that_begins_anew_in_its_folder_is_shown_anew(tmp_path: Path, opened: Open) -> None:
    folder = full_run(tmp_path / "mine")
    with Dashboard([folder]) as server:
        page = opened(server)
        page.locator('[data-chart="reward"] .legend b', has_text="0.44").wait_for()

        os.truncate(folder / "metrics.jsonl", 0)
        for path in folder.glob("rollouts/*"):
            path.unlink()
        (folder / "config.yaml").write_bytes(b"run: [half")
        page.locator('[data-panel="reward"] .missing p').first.wait_for()
        page.locator('[data-panel="configuration"] .missing p', has_text="no config.yaml").wait_for()

        write_step(folder, 1, reward=0.11)
        page.locator('[data-chart="reward"] .legend b', has_text="0.11").wait_for()


def test_runs_are_drawn_over_one_another_and_told_apart(tmp_path: Path, opened: Open) -> None:
    folders = [full_run(tmp_path / "a/mine"), full_run(tmp_path / "b/mine", steps=8)]
    begin_run(tmp_path / "b/new", {**CONFIG, "learner": {"lr": 3e-5, "schedule": "cosine"}})
    with Dashboard([*folders, tmp_path / "b/new"]) as server:
        page = opened(server)
        legend = page.locator('[data-chart="accuracy"] .legend')
        legend.locator("li").first.wait_for()
        labels = legend.locator(".label").all_inner_texts()
        assert labels == [f"{run}/mine · {line}" for run in "ab" for line in ("all", "easy", "hard")]
        colours = {
            key.evaluate("key => getComputedStyle(key).backgroundColor")
            for key in legend.locator(".key:not(.dashed)").all()
        }
        assert len(colours) == 2

        page.locator('[data-run="b/mine"]').click()
        page.locator('[data-chart="accuracy"] .legend .label', has_text="b/mine").first.wait_for(state="detached")

        keys = page.locator('[data-chart="keys"]')
        keys.scroll_into_view_if_needed()
        keys.get_by_label("only what differs").check()
        assert keys.locator("tbody tr td:first-child").all_inner_texts() == ["learner.lr", "learner.schedule"]


NASTY = (
    "<script>window.ran=1</script><img src=x onerror=window.ran=1><a href='javascript:window.ran=1'>x</a>"
    "\x1b[31m\x00\u202eabc"
)
SCRIPT = "() => { const e = document.createElement('script'); e.textContent = 'window.ran=2'; document.body.append(e) }"


@pytest.mark.parametrize("width", [1200, 360])
def test_what_a_model_wrote_is_shown_as_text_and_never_run(tmp_path: Path, opened: Open, width: int) -> None:
    folder = begin_run(tmp_path / "<img src=x onerror=window.ran=1>", {**CONFIG, "data": {NASTY[:60]: NASTY}})
    write_step(folder, 1)
    long = "long" * 30_000
    story = {
        "messages": [
            {"role": "assistant", "content": NASTY}, {"role": NASTY, "content": [NASTY]},
            {"role": "tool", "name": NASTY, "arguments": {NASTY: NASTY}, "content": NASTY, "error": True},
            {"role": "assistant", "content": long},
        ],
        "token_ids": [1, 2], "model_spans": [[1, 2]], "logprobs": [-1.0], "version_spans": [[1, 0, 1]],
    }  # fmt: skip
    keep(folder, 1, "t1", story, prompt=NASTY, reason=NASTY[:200], generator=NASTY[:60], reward_parts={"<b>": 1.0})
    with Dashboard([folder]) as server:
        page = opened(server, "episodes", width)
        page.locator(".list li").click()
        page.locator(".message.error").wait_for()

        shown = page.locator(".episode").inner_text()
        assert shown.count("<script>window.ran=1</script>") >= 4
        assert "\\x1b[31m\\x00\\u202eabc" in shown
        assert not set("\x1b\x00\u202e") & set(page.content())
        assert page.locator(".episode script, .episode img, .episode a").count() == 0
        page.locator("#tab-charts").click()
        page.locator('[data-chart="keys"]').scroll_into_view_if_needed()
        page.locator('[data-chart="keys"] td', has_text="<script>").first.wait_for()
        assert page.evaluate("window.ran") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_of_another_site_cannot_frame_it_nor_run_script_in_it(tmp_path: Path, browser: Browser) -> None:
    with Dashboard([full_run(tmp_path / "mine")]) as server:
        page = browser.new_page()
        page.goto(server.url)
        # The policy holds in a real browser: markup that gets in would still run nothing.
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.ran=1\">')")
        page.evaluate(SCRIPT)
        page.wait_for_load_state("load")
        assert page.evaluate("window.ran") is None
        failed = page.evaluate("() => fetch('http://127.0.0.2:9/').then(() => 'sent', (error) => error.name)")
        assert failed == "TypeError"
        page.close()
