"""The dashboard as people use it: keyboard, search, dark and narrow, the token in the address, the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.dashboard import Dashboard, full_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SELECTED = '.list li[aria-selected="true"] .prompt'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    with Dashboard([full_run(tmp_path_factory.mktemp("runs") / "mine")]) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Dashboard) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(180_000)
    page.goto(server.url)
    yield page
    context.close()


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.className || document.activeElement.id"))


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_the_first_tab_leads_past_the_head(page: Page) -> None:
    page.locator('[data-panel="reward"]').wait_for()
    page.keyboard.press("Tab")
    assert focused(page) == "skip"
    box = page.locator(".skip").bounding_box()
    assert box is not None
    assert box["y"] >= 0, "it is seen while it has the focus"
    page.keyboard.press("Enter")
    assert focused(page) == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#main') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_episodes_are_read_without_a_mouse(page: Page) -> None:
    page.locator("#tab-episodes").focus()
    page.keyboard.press("Enter")
    page.locator(".list li").first.wait_for()
    page.locator(".episode h2").wait_for()
    names = page.locator(".list li").all_inner_texts()
    assert len(names) == 50

    page.keyboard.press("j")
    page.keyboard.press("j")
    page.locator('#episode-2[aria-selected="true"]').wait_for()
    page.keyboard.press("k")
    page.locator('#episode-1[aria-selected="true"]').wait_for()

    page.keyboard.press("/")
    page.keyboard.type("HOW MUCH is 7 +")
    page.locator(".pager", has_text="1 found").wait_for()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.locator(SELECTED, has_text="How much is 7 + 7?").wait_for()
    page.locator(".message.user", has_text="How much is 7 + 7?").wait_for()
    assert page.locator(".list").get_attribute("aria-activedescendant") == "episode-0"
    page.keyboard.press("Enter")
    assert focused(page) == "episode"
    page.keyboard.press("Escape")
    assert focused(page) == "list"


def test_pages_are_turned_at_their_ends(page: Page) -> None:
    page.locator("#tab-episodes").click()
    page.locator(".pager", has_text="1–50 of 65").wait_for()
    page.locator("#episode-49").click()
    page.keyboard.press("j")
    page.locator(".pager", has_text="51–65 of 65").wait_for()
    page.locator('#episode-0[aria-selected="true"]').wait_for()
    page.keyboard.press("k")
    page.locator(".pager", has_text="1–50 of 65").wait_for()
    page.locator('#episode-49[aria-selected="true"]').wait_for()


def test_tokens_are_coloured_by_what_is_known_of_them(page: Page) -> None:
    page.locator("#tab-episodes").click()
    page.get_by_label("Kind").select_option("with tokens")
    page.locator(".pager", has_text="1–1 of 1").wait_for()
    page.locator("#episode-0").click()
    tokens = page.locator(".tokens .token")
    page.locator(".tokens").wait_for()

    def classes() -> list[str]:
        return [str(token.get_attribute("class")) for token in tokens.all()]

    given = "token given"
    assert classes() == [given, given, "token q0", "token q1", given, "token q2", "token q4"]
    page.get_by_label("version", exact=True).check()
    assert classes() == [given, given, "token v0", "token v1", given, "token v1", "token v1"]
    page.get_by_label("advantage").check()
    assert classes() == [given, given, "token up2", "token up2", given, "token down1", "token down1"]
    page.get_by_label("probability ratio").check()
    assert classes() == [given, given, "token a0", "token down2", given, "token up1", "token up2"]
    page.get_by_label("entropy").check()
    assert classes() == [given, given, "token q0", "token q2", given, "token q3", "token q4"]


def test_an_episode_that_no_batch_trained_on_has_no_ratios_or_entropies(page: Page, tmp_path: Path) -> None:
    folder = full_run(tmp_path / "waiting")
    (folder / "training_data/11.0.jsonl").unlink()
    with Dashboard([folder]) as waiting:
        page.goto(waiting.url)
        page.locator("#tab-episodes").click()
        page.get_by_label("Kind").select_option("with tokens")
        page.locator(".pager", has_text="1–1 of 1").wait_for()
        page.locator("#episode-0").click()
        page.locator(".tokens").wait_for()
    for unknown in ("probability ratio", "entropy"):
        page.get_by_label(unknown).check()
        assert "No batch's record has this episode" in page.locator(".choices + .missing").inner_text()
    page.get_by_label("advantage").check()
    assert "before a batch's normalisation" in page.locator(".choices + .note").inner_text()


def test_a_prompt_of_the_tracker_leads_to_its_episodes(page: Page) -> None:
    row = page.locator('[data-chart="prompts"]')
    row.scroll_into_view_if_needed()
    row.get_by_role("button", name="p-t2").click()
    page.locator(".pager", has_text="1 found").wait_for()
    assert page.locator(".list .prompt").all_inner_texts() == ["How much is 2 + 2?"]


def test_dark_and_light_follow_the_system_until_somebody_chooses(browser: Browser, server: Dashboard) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(server.url)
    dark = background(page)
    page.emulate_media(color_scheme="light")
    page.locator('html[data-theme="light"]').wait_for()
    light = background(page)
    assert dark != light

    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "Dark"
    assert background(page) == dark
    page.reload()
    assert background(page) == dark, "the choice is kept"
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_scrolling_sideways(browser: Browser, server: Dashboard, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 720}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()

    def width() -> int:
        return int(page.evaluate("document.documentElement.scrollWidth"))

    page.goto(server.url)
    for card in page.locator("[data-chart]").all():
        card.scroll_into_view_if_needed()
    assert width() <= 360
    page.goto(f"{server.url}#/episodes")
    page.locator(".list li").first.wait_for()
    assert width() <= 360
    page.locator(".list li").first.click()
    page.locator(".episode h2").wait_for()
    assert page.locator(".list").is_hidden()
    assert width() <= 360
    page.locator(".back").click()
    assert page.locator(".list").is_visible()
    page.get_by_role("button", name="Filters").click()
    assert page.get_by_label("Ending").is_visible()
    assert width() <= 360
    context.close()


def test_the_address_with_its_token_opens_the_page(browser: Browser, tmp_path: Path) -> None:
    with Dashboard([full_run(tmp_path / "mine")], token="se cret") as server:
        context = browser.new_context()
        page = context.new_page()
        answer = page.goto(server.url)
        assert answer is not None
        assert answer.status == 401
        page.goto(f"{server.url}?token=se%20cret#/episodes")
        page.locator(".list li").first.wait_for()
        assert "se" not in page.url.partition("#")[0].partition(str(server.port))[2]
        context.close()


def test_the_command_prints_the_address_and_ends_by_ctrl_c(browser: Browser, tmp_path: Path) -> None:
    full_run(tmp_path / "runs/mine")
    command = [sys.executable, "-m", "launcher.cli", "dashboard", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        page = browser.new_page()
        page.goto(found[0])
        page.locator('[data-chart="reward"]').wait_for()
        process.send_signal(signal.SIGINT)
        page.locator(".connection.lost").wait_for()
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        page.close()
    finally:
        process.kill()
        process.wait()
