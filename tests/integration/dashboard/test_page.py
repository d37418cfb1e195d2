"""The page in a browser, live, saved and compared: what it shows, how it is used, and text of others in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from common.errors import UserError
from launcher.compare import compared, comparison_panel
from launcher.folder.query import Query
from launcher.folder.query import page as answered
from launcher.folder.run import read_one
from launcher.page.html import STATIC
from launcher.page.saved import save
from tests.support.dashboard import Dashboard, Open, served
from tests.support.episode_rows import keep
from tests.support.run_folder import PANELS, add_tracker, finished_run, full_run, make_run, write_episodes, write_step
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DRAWN = '[data-panel="{}"] [data-chart]:not([hidden])'
REWARD = '[data-chart="reward"] .legend b'
FOCUSED = "document.activeElement.className || document.activeElement.id"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
WIDTH = "document.documentElement.scrollWidth"
# Titles of the tables that are wider than their card.
CUT_TABLES = """[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth)
    .map(box => box.parentElement.textContent.slice(0, 40))"""

# Words of headings that are broken into several lines.
BROKEN_WORDS = """[...document.querySelectorAll('th')].flatMap(head =>
    [...head.textContent.matchAll(/[^\\s-]+/g)].filter(({ 0: word, index }) => {
      const range = document.createRange();
      range.setStart(head.firstChild, index);
      range.setEnd(head.firstChild, index + word.length);
      return range.getClientRects().length > 1;
    }).map(([word]) => word))"""


def drawn_panels(page: Page) -> set[str]:
    return {name for name in PANELS if page.locator(DRAWN.format(name)).count()}


def test_every_panel_is_drawn(page: Page) -> None:
    page.locator('[data-panel="configuration"]').wait_for()
    assert drawn_panels(page) == set(PANELS)
    for card in page.locator("[data-chart]").all():
        card.scroll_into_view_if_needed()
        card.locator("canvas, table, details").first.wait_for()
    assert page.locator(".cards > .missing p").all_inner_texts() == ["Dead letters\nNone."]
    assert page.locator('[data-chart="reward"] .legend').inner_text().split() == ["mean", "0.44"]
    assert "learner is the bottleneck" in page.locator('[data-panel="throughput"] .words').inner_text()
    assert "50.0 points" in page.locator('[data-panel="summary"] .words').inner_text()
    pair = page.locator('[data-chart="pairs"] details').first
    pair.scroll_into_view_if_needed()
    pair.locator(".message.assistant", has_text="answer 0 of version 10").wait_for()
    texts = pair.locator(".content").all_inner_texts()
    assert texts == ["question e10-0", "answer 0 of version 0", "answer 0 of version 10"]
    row = page.locator('[data-chart="prompts"]')
    row.scroll_into_view_if_needed()
    row.get_by_role("button", name="p-t2").click()
    page.locator(".pager", has_text="1–1 of 1").wait_for()
    assert page.locator(".list .prompt").all_inner_texts() == ["How much is 2 + 2?"]


def test_a_hashed_prompt_is_listed_and_found_by_its_text(opened: Open, tmp_path: Path) -> None:
    folder, hashed = make_run(tmp_path / "mine"), "00112233445566aa"
    keep(folder, 10, "t1", prompt_id=hashed, prompt="How much is 2 + 2?")
    add_tracker(folder, {hashed: 1} | {f"p{i}": 1 for i in range(20)})
    with served(folder, "Report") as pages:
        for address in (pages["live"], pages["saved"]):
            page = opened(address)
            card = page.locator('[data-chart="prompts"]')
            card.scroll_into_view_if_needed()
            card.get_by_label("Filter the rows").fill("2 + 2")
            assert card.locator("td button").all_inner_texts() == ["How much is 2 + 2?"]
            card.locator(f'button[title="{hashed}"]').click()
            page.locator(".pager", has_text="1–1 of 1").wait_for()


def open_tokens(page: Page) -> None:
    page.locator("#tab-episodes").click()
    page.get_by_label("Kind").select_option("with tokens")
    page.locator(".pager", has_text="1–1 of 1").wait_for()
    page.locator("#episode-0").click()
    page.locator(".tokens").wait_for()


TICKS = """() => {
  %s
  return [
    ["", [1e-4, 1.5e-4, 2e-4]], ["", [0, 5e-7, 1e-6]], ["", [0.0005, 0.001, 0.0015]], ["", [-0.5, 0, 0.5]],
    ["", [100000, 105000, 110000]], ["", [9800, 9900, 10000]], ["share", [0.025, 0.05, 0.075]],
    ["share", [0.9985, 0.999, 0.9995]], ["tokens", [2.5, 5, 7.5]],
  ].map(([unit, ticks]) => labels(ticks, ticks[1] - ticks[0], unit).join(" ")).concat(
    [[30, 60, 90], [60, 120, 180], [3540, 3600, 3660], [3600, 5400, 7200], [86400, 172800]].map(
      (ticks) => ticks.map((tick) => clock(tick, ticks[1] - ticks[0])).join(" ")));
}"""


def test_ticks_keep_the_digits_that_tell_them_apart(browser: Browser) -> None:
    page = browser.new_page()
    modules = "\n".join((STATIC / name).read_text() for name in ("dom.js", "charts.js"))
    shown = page.evaluate(TICKS % re.sub(r"^import .*\n|^export ", "", modules, flags=re.MULTILINE))
    page.close()
    assert shown == [
        "1.0e-4 1.5e-4 2.0e-4", "0 5e-7 1.0e-6", "0.0005 0.0010 0.0015", "-0.5 0.0 0.5", "1.00e+5 1.05e+5 1.10e+5",
        "9,800 9,900 10,000", "2.5% 5.0% 7.5%", "99.85% 99.90% 99.95%", "2.5 5.0 7.5",
        "30 s 1:00 min 1:30 min", "1 min 2 min 3 min", "59 min 1:00 h 1:01 h", "1:00 h 1:30 h 2:00 h", "1 d 2 d",
    ]  # fmt: skip


def test_panels_come_and_change_while_the_run_goes_on(tmp_path: Path, opened: Open) -> None:
    folder = make_run(tmp_path / "mine", run={"steps": 40})
    with Dashboard([folder]) as server:
        page = opened(server.url)
        page.locator('[data-panel="reward"]').wait_for()
        assert drawn_panels(page) == {"summary", "configuration"}
        assert page.locator('[data-panel="reward"] .missing p').count() > 0

        write_step(folder, 5, reward=0.5)
        write_episodes(folder)
        (folder / "training_data/11.0.jsonl").unlink()
        for name in {*PANELS} - {"before-and-after"}:
            page.locator(DRAWN.format(name)).first.wait_for()
        write_step(folder, 6, reward=0.75)
        page.locator(REWARD, has_text="0.75").wait_for()
        page.locator(".run-figures", has_text="6 / 40 steps").wait_for()
        # An episode that was not trained on has neither ratios nor entropies.
        open_tokens(page)
        for unknown in ("probability ratio", "entropy"):
            page.get_by_label(unknown).check()
            assert "No batch's record has this episode" in page.locator(".choices + .missing").inner_text()
        page.get_by_label("advantage").check()
        assert "before a batch's normalisation" in page.locator(".choices + .note").inner_text()
        page.locator("#tab-charts").click()

        server.stop()
        page.locator(".connection.lost").wait_for()
        write_step(folder, 13, reward=0.99)
        server.start()
        page.locator(REWARD, has_text="0.99").wait_for()
        page.locator(".connection.live").wait_for()

        # The run begins again in its folder.
        os.truncate(folder / "metrics.jsonl", 0)
        shutil.rmtree(folder / "rollouts")
        (folder / "config.yaml").write_bytes(b"run: [half")
        page.locator('[data-panel="reward"] .missing p').first.wait_for()
        page.locator('[data-panel="configuration"] .missing p', has_text="no readable config.yaml").wait_for()
        write_step(folder, 1, reward=0.11)
        page.locator(REWARD, has_text="0.11").wait_for()


def test_runs_are_drawn_over_one_another_and_told_apart(tmp_path: Path, opened: Open) -> None:
    folders = [full_run(tmp_path / "a/mine"), full_run(tmp_path / "b/mine", steps=8)]
    folders.append(make_run(tmp_path / "b/new", run={"steps": 40}, learner={"lr": 3e-5, "schedule": "cosine"}))
    with Dashboard(folders) as server:
        page = opened(server.url)
        legend = page.locator('[data-chart="accuracy"] .legend')
        legend.locator("li").first.wait_for()
        labels = legend.locator(".label").all_inner_texts()
        assert labels == [f"{run}/mine · {line}" for run in "ab" for line in ("all", "easy", "hard")]
        keys = legend.locator(".key:not(.dashed)").all()
        assert len({key.evaluate("key => getComputedStyle(key).backgroundColor") for key in keys}) == 2

        page.locator('[data-run="b/mine"]').click()
        page.locator('[data-chart="accuracy"] .legend .label', has_text="b/mine").first.wait_for(state="detached")
        table = page.locator('[data-chart="keys"]')
        table.scroll_into_view_if_needed()
        table.get_by_label("only what differs").check()
        assert set(table.locator("tbody tr td:first-child").all_inner_texts()) >= {"learner.lr", "learner.schedule"}
        assert "learner.weight_decay" not in table.inner_text()


def test_compared_runs_have_their_figures_first(tmp_path: Path, opened: Open) -> None:
    runs = [read_one(finished_run(tmp_path / f"mine-{seed}", seed=seed, gain=0.1 + seed / 50)) for seed in range(3)]
    runs.append(read_one(finished_run(tmp_path / "other", learner={"lr": 3e-4})))
    save(tmp_path / "compared.html", "4 runs compared", runs, comparison_panel(compared(runs, [], None)))
    page = opened((tmp_path / "compared.html").as_uri())
    assert page.locator(".panel h2").first.inner_text() == "4 runs compared"
    assert page.locator(".connection").inner_text().startswith("saved ")
    rows = page.locator('[data-chart="lines-compared"] tbody tr')
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["lr=1e-06 (3 runs)", "lr=0.0003"]
    page.locator('[data-chart="reward-compared"] canvas').wait_for()
    accuracy = page.locator('[data-chart="accuracy"]')
    accuracy.scroll_into_view_if_needed()
    accuracy.locator(".label", has_text="other").wait_for()
    assert accuracy.locator(".legend .label").count() == 4, "the runs themselves are below"


def test_the_page_is_read_without_a_mouse(opened: Open, pages: dict[str, str]) -> None:
    page = opened(pages["saved"])
    page.locator('[data-panel="reward"]').wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED) == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "it is seen"
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUSED) == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#main') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"

    page.locator("#tab-episodes").focus()
    page.keyboard.press("Enter")
    page.locator(".episode h2").wait_for()
    for keys, row in (("jj", 2), ("k", 1)):
        for key in keys:
            page.keyboard.press(key)
        page.locator(f'#episode-{row}[aria-selected="true"]').wait_for()
    # Pages are turned at their ends.
    page.locator(".pager", has_text="1–50 of 65").wait_for()
    page.locator("#episode-49").click()
    for key, shown, row in (("j", "51–65 of 65", 0), ("k", "1–50 of 65", 49)):
        page.keyboard.press(key)
        page.locator(".pager", has_text=shown).wait_for()
        page.locator(f'#episode-{row}[aria-selected="true"]').wait_for()

    page.keyboard.press("/")
    page.keyboard.type("HOW MUCH is 7 +")
    page.locator(".pager", has_text=re.compile("1 found|1–1 of 1")).wait_for()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.locator('.list li[aria-selected="true"] .prompt', has_text="How much is 7 + 7?").wait_for()
    page.locator(".message.user", has_text="How much is 7 + 7?").wait_for()
    assert page.locator(".list").get_attribute("aria-activedescendant") == "episode-0"
    page.keyboard.press("Enter")
    assert page.evaluate(FOCUSED) == "episode"
    page.keyboard.press("Escape")
    assert page.evaluate(FOCUSED) == "list"


QUERIES: list[dict[str, str]] = [
    {}, {"kind": "train", "sort": "step"}, {"kind": "failed"}, {"kind": "with tokens"}, {"reward": "<0.5,!=0"},
    {"reward": ">= 1e0"}, {"reward": "low"}, {"version": "11"}, {"version": "3-10"}, {"version": "x"},
    {"reason": "LENGTH"}, {"reason": "ToolUnavailable: no sandbox"}, {"prompt": "p-t7"}, {"prompt": "IS 1"},
    {"text": "Let ME"}, {"text": "12*7"}, {"generator": "g1", "sort": "-reward"}, {"sort": "reward"},
]  # fmt: skip
SET = """([values]) => {
  for (const field of document.querySelectorAll(".filters [name]")) {
    const value = values[field.name] ?? (field.name === "sort" ? "-step" : "");
    if (field.options && ![...field.options].some((one) => one.value === value)) field.append(new Option(value, value));
    if (field.name !== "runChoice") field.value = value;
  }
}"""


def test_a_file_answers_queries_as_the_server_does(opened: Open, pages: dict[str, str]) -> None:
    page, index = opened(pages["saved"], "episodes"), read_one(Path(pages["folder"])).episodes
    page.locator(".list li").first.wait_for()
    for query in QUERIES:
        page.evaluate(SET, [query])
        page.locator('[name="text"]').press("Enter")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        try:
            expected: object = [row["prompt"] for row in answered(index, Query(**query), 0, 50).rows]
        except UserError as error:
            expected = str(error)
        prompts = page.locator(".list li[data-at] .prompt").all_inner_texts()
        shown = page.locator(".pager span").inner_text() if isinstance(expected, str) else prompts
        assert shown == expected, query


def test_tokens_are_coloured_by_what_is_known_of_them(opened: Open, pages: dict[str, str]) -> None:
    page = opened(pages["live"])
    open_tokens(page)
    tokens = page.locator(".tokens .token")
    for colouring, classes in {
        "log-prob": "given given q0 q1 given q2 q4",
        "version": "given given v0 v1 given v1 v1",
        "advantage": "given given up2 up2 given down1 down1",
        "probability ratio": "given given a0 down2 given up1 up2",
        "entropy": "given given q0 q2 given q3 q4",
    }.items():
        page.locator(".choices").get_by_label(colouring, exact=True).check()
        assert [token.get_attribute("class") for token in tokens.all()] == [f"token {one}" for one in classes.split()]


def test_dark_and_light_follow_the_system_until_one_is_chosen(opened: Open, pages: dict[str, str]) -> None:
    page = opened(pages["live"], color_scheme="dark")
    dark = page.evaluate(BACKGROUND)
    page.emulate_media(color_scheme="light")
    page.locator('html[data-theme="light"]').wait_for()
    assert page.evaluate(BACKGROUND) != dark
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "System's colours", "the button says what it does"
    assert page.evaluate(BACKGROUND) == dark

    def is_kept() -> bool:
        page.reload()
        return bool(page.evaluate(BACKGROUND) == dark)

    eventually(is_kept)  # the browser stores the choice in its own time


def test_a_narrow_screen_needs_no_scrolling_sideways(opened: Open, pages: dict[str, str]) -> None:
    page = opened(pages["saved"], width=360)
    page.locator('[data-panel="configuration"]').wait_for()
    for card in page.locator("[data-chart]").all():
        card.scroll_into_view_if_needed()
    assert page.evaluate(WIDTH) <= 360
    page.set_viewport_size({"width": 400, "height": 900})
    assert page.evaluate(CUT_TABLES) == []
    assert page.evaluate(BROKEN_WORDS) == []
    page.set_viewport_size({"width": 360, "height": 900})
    page.locator("#tab-episodes").click()
    page.locator(".list li").first.click()
    page.locator(".episode h2").wait_for()
    assert page.locator(".list").is_hidden()
    assert page.evaluate(WIDTH) <= 360
    page.locator(".back").click()
    page.get_by_role("button", name="Filters").click()
    assert page.get_by_label("Ending").is_visible()
    assert page.evaluate(WIDTH) <= 360


NASTY = (
    "</script><script>window.ran=1</script><img src=x onerror=window.ran=1><a href='javascript:window.ran=1'>x</a>"
    "\x1b[31m\x00\u202eabc"
)


def test_what_a_model_wrote_is_shown_and_never_run(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=window.ran=1>"
    make_run(folder, data={"system_prompt": NASTY}, run={"name": "x", "experiment": "x"})
    write_step(folder, 1)
    story = {
        "messages": [
            {"role": "assistant", "content": NASTY}, {"role": NASTY, "content": [NASTY]}, {"role": 7},
            {"role": "tool", "name": NASTY, "arguments": {NASTY: NASTY}, "content": NASTY, "error": True},
            {"role": "assistant", "content": "long" * 30_000},
        ],
        "token_ids": [1, 2], "model_spans": [[1, 2]], "logprobs": [-1.0], "version_spans": [[1, 0, 1]],
        "row_lengths": [1, 1],
    }  # fmt: skip
    keep(folder, 1, "t1", story, prompt=NASTY, reason=NASTY[:200], generator=NASTY[:60], reward_parts={"<b>": 1.0})
    save(tmp_path / "report.html", NASTY, [read_one(folder)])
    page = opened((tmp_path / "report.html").as_uri(), "episodes")
    page.locator(".list li").click()
    page.locator(".message.error").wait_for()
    shown = page.locator(".episode").inner_text()
    assert shown.count("<script>window.ran=1</script>") >= 4
    assert "\\x1b[31m\\x00\\u202eabc" in shown
    assert page.locator(".tokens .row").all_inner_texts() == ["row 1 of 2", "row 2 of 2"]
    assert not set("\x1b\x00\u202e") & set(page.locator("body").inner_html())
    assert page.locator(".episode script, .episode img, .episode a").count() == 0
    for width in (1200, 360):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(WIDTH) <= width
    page.locator("#tab-charts").click()
    page.locator('[data-chart="keys"]').scroll_into_view_if_needed()
    page.locator('[data-chart="keys"] td', has_text="<script>").first.wait_for()
    assert page.evaluate("window.ran") is None
    assert page.evaluate(WIDTH) <= 360


def test_markup_that_got_in_would_run_nothing(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.ran=1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran=2'}))")
    page.wait_for_load_state("load")
    assert page.evaluate("window.ran") is None
    failed = page.evaluate("() => fetch('http://127.0.0.2:9/').then(() => 'sent', (error) => error.name)")
    assert failed == "TypeError"
    page.close()


def test_the_command_prints_the_address_and_ends_by_ctrl_c(browser: Browser, tmp_path: Path) -> None:
    full_run(tmp_path / "runs/mine")
    command = [sys.executable, "-m", "launcher.cli", "dashboard", "--port", "0", "--token", "se cret"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = Popen(command, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        [(printed, bare)] = re.findall(r"((http://127\.0\.0\.1:\d+/)\?token=se%20cret)", line)
        page = browser.new_page()
        assert page.request.get(bare).status == 401
        page.goto(f"{printed}#/episodes")
        page.locator(".list li").first.wait_for()
        assert page.url.partition("#")[0] == bare, "the token does not stay in the address"
        process.send_signal(signal.SIGINT)
        page.locator(".connection.lost").wait_for()
        _, errors = process.communicate(timeout=600)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()
