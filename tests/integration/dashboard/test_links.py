"""Links to what is shown, what a search marks, and what a page says of a run besides its curves."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from launcher.dashboard import watch
from tests.support.dashboard import Dashboard, Open
from tests.support.run_folder import add_summary, full_run, write_step

pytestmark = pytest.mark.slow


def test_what_is_shown_has_a_link(pages: dict[str, str], tmp_path: Path, opened: Open) -> None:
    other = full_run(tmp_path / "other")
    with Dashboard([Path(pages["folder"]), other]) as server:
        page = opened(server.url)
        page.locator('[data-run="mine"]').click()
        page.get_by_role("link", name="Configuration").click()
        page.locator("#panel-configuration:focus").wait_for()
        sent = opened(server.url, page.url.partition("#/")[2])
        sent.locator("#panel-configuration:focus").wait_for()
        assert sent.locator('[data-run][aria-pressed="true"]').all_inner_texts()[0].startswith("other")
        assert sent.locator('[data-run][aria-pressed="true"]').count() == 1

        page.locator("#tab-episodes").click()
        page.locator('[name="runChoice"]').select_option("other")
        page.get_by_label("Ending").select_option("length")
        page.locator(".pager", has_text="1–1 of 1").wait_for()
        page.locator("#episode-0").click()
        page.locator(".episode h2", has_text="t60").wait_for()
        # Also an episode that is not on the list's first page.
        page.get_by_label("Ending").select_option("")
        page.locator(".pager", has_text="of 65").wait_for()
        sent.goto(page.url)
        sent.reload()
        sent.locator(".episode h2", has_text="t60").wait_for()
        assert sent.locator('[name="runChoice"]').input_value() == "other"


def test_words_that_were_searched_for_are_marked(pages: dict[str, str], opened: Open) -> None:
    page = opened(pages["saved"])
    page.locator("#tab-episodes").click()
    page.get_by_label("Search").fill("MUCH is 7")
    page.locator(".list mark", has_text="much is 7").wait_for()
    page.locator("#episode-0").click()
    page.locator(".message.user mark", has_text="much is 7").wait_for()
    page.get_by_label("Search").fill("p-t7")
    page.locator(".list mark").wait_for(state="detached")
    page.locator("#episode-0").click()
    page.locator(".facts mark", has_text="p-t7").first.wait_for()
    assert page.locator(".episode h2 .id").inner_text() == "t7"
    assert "monospace" in page.locator(".episode h2 .id").evaluate("id => getComputedStyle(id).fontFamily")


def test_changes_and_the_end_of_a_run_are_seen(tmp_path: Path, opened: Open) -> None:
    folder = full_run(tmp_path / "mine")
    add_summary(folder, finished=False, steps=12, error="learner died 6 times: out of memory")
    with Dashboard([folder]) as server:
        page = opened(server.url)
        change = page.locator('[data-chart="reward"] .change')
        change.wait_for()
        assert change.get_attribute("title") == "after step 3: learner.lr: 1e-06 → 1e-05"
        card = page.locator(".run").inner_text()
        assert "ended with: learner died 6 times: out of memory" in card
        assert "5 min" in card, "from the first to the last entry"
        assert page.locator(".connection").inner_text() == "connected", "nothing is live"
        # A command of this process holds the folder from now on.
        (folder / "summary.json").unlink()
        (folder / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        write_step(folder, 13)
        page.locator(".connection", has_text="live").wait_for()
        page.locator(".run .time", has_text="about 13 min left").wait_for()


def test_new_runs_appear(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK", 0.1)
    full_run(tmp_path / "a")
    with Dashboard([tmp_path]) as server:
        page = opened(server.url)
        page.locator('[data-chart="reward"] canvas').wait_for()
        full_run(tmp_path / "b")
        page.locator('[data-run="b"]').click()
        page.locator('[data-chart="reward"] .legend .label', has_text="b").wait_for()
