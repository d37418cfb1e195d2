"""`spo report` on run folders: the page read back, opened in a browser, and refused where there is no run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.chromium import NoChromium, chromium
from tests.support.page import Page
from tests.support.run_folder import add_evaluation, add_metrics, add_summary, change_config, finished_run, make_run
from tests.support.spo_command import Spo, spo_here

HOSTILE = '<script>alert("run")</script><img src=x onerror=alert(1)>\x1b[31m\x00\u202e</pre>{{ 7 * 7 }}$x^2$'
SECTIONS = {"headline", "curves", "configuration", "before-and-after", "time", "books", "versions"}


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spo:
    return spo_here(capsys, monkeypatch)


def report_of(spo: Spo, folder: Path) -> Page:
    ran = spo("report", folder)
    assert (ran.returncode, ran.stderr, ran.stdout.split()) == (0, "", [str(folder / "report.html")])
    return Page((folder / "report.html").read_text())


def assert_self_contained(page: Page) -> None:
    assert [address for address in page.addresses if not address.startswith("#")] == []
    assert page.handlers == []
    assert not page.tags.keys() & {"script", "img", "link", "iframe", "object", "embed"}
    assert [name for name, times in Counter(page.ids).items() if times > 1] == []


def test_the_page_of_a_finished_run_has_every_section_and_asks_for_nothing(spo: Spo, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine", learner={"lr": 3e-4})
    (folder / "changes.jsonl").write_text('{"step": 3, "key": "run.steps", "from": 4, "to": 6, "time": 1}\n')
    page = report_of(spo, folder)
    assert_self_contained(page)
    assert set(page.ids) >= SECTIONS | {"accuracy", "reward", "staleness", "throughput"}
    assert page.tags["svg"] == 4
    for text in (
        "50.0% → 75.0%", "+25.0 points", "learner.lr", "0.0003", "question a", "answer 0 of version 6", "run.steps",
        "waiting for a batch", "generator-1", "60 = 60 + 0", "8.1.0", "finished", "learner waited 20% of its time",
    ):  # fmt: skip
        assert text in page.seen


def test_what_models_and_others_wrote_is_shown_as_text(spo: Spo, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", data={"system_prompt": HOSTILE}, run={"name": "x"})
    messages = [{"role": "assistant", "content": HOSTILE}, {"role": HOSTILE, "name": HOSTILE, "content": [HOSTILE]}]
    story = {"messages": messages, "gts": HOSTILE, "input": HOSTILE}
    add_evaluation(folder, 0, {HOSTILE: [0.0]}, **story)
    add_evaluation(folder, 6, {HOSTILE: [1.0]}, **story)
    add_metrics(
        folder, 0, "sampler", **{f"validation__{HOSTILE}__accuracy": 0.5, f"validation__{HOSTILE}2__accuracy": 1}
    )
    add_metrics(folder, 0, HOSTILE, generator__tokens_per_second=1.0)
    add_metrics(folder, 0, "_hidden", generator__tokens_per_second=2.0)
    add_summary(folder, counters={HOSTILE: 1, "dispatched": 1}, seconds={HOSTILE: 1.0})
    (folder / "versions.jsonl").write_text('{"process": "<b>", "python": "<i>", "packages": {"<u>": "<s>"}}\n')
    (folder / "chaos.json").write_text('{"checks": [{"name": "<b>", "problem": "<i>"}]}')
    page = report_of(spo, folder)
    assert_self_contained(page)
    assert not page.tags.keys() & {"b ", "i ", "u", "s"}
    assert page.seen.count('<script>alert("run")</script><img src=x onerror=alert(1)>\\x1b[31m\\x00\\u202e') >= 5
    assert "{{ 7 * 7 }}" in page.seen
    assert not any(character in page.seen for character in "\x1b\x00\u202e")


@pytest.mark.parametrize("state", ["just begun", "without evaluation", "of another release", "killed"])
def test_runs_that_lack_something_have_a_page_all_the_same(spo: Spo, tmp_path: Path, state: str) -> None:
    folder = tmp_path / "mine"
    if state == "just begun":
        make_run(folder)
    elif state == "without evaluation":
        make_run(folder)
        for version in range(1, 7):
            add_metrics(folder, version, "sampler", reward__mean=0.1 * version)
        add_summary(folder)
    else:
        finished_run(folder)
        if state == "of another release":
            change_config(folder, learner={"forgotten": 1}, elsewhere={"key": {"deep": [1]}})
            (folder / "versions.jsonl").unlink()
        else:
            (folder / "summary.json").unlink()
    ran = spo("report", folder)
    assert ran.returncode == 0
    page = Page((folder / "report.html").read_text())
    assert_self_contained(page)
    assert set(page.ids) >= SECTIONS
    expected = {
        "just begun": "nothing was evaluated yet",
        "without evaluation": "nothing held out was evaluated",
        "of another release": "learner.forgotten",
        "killed": "not finished: stopped at step 6 of 6",
    }
    assert expected[state] in page.seen


def test_pictures_are_written_beside_it(spo: Spo, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    ran = spo("report", folder / "config.yaml", "-o", tmp_path / "out" / "page.html", "--png", tmp_path / "pictures")
    assert ran.returncode == 0
    names = [Path(line).name for line in ran.stdout.split()]
    assert names == ["page.html", "accuracy.png", "reward.png", "staleness.png", "throughput.png"]
    assert all((tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG") for name in names[1:])


def test_what_cannot_be_is_one_line_and_exit_code_2(spo: Spo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(tmp_path / "mine")
    make_run(tmp_path / "other")
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ((tmp_path / "none",), "does not exist"),
        ((tmp_path,), "holds 2 runs: name one of them"),
        ((folder, "-o", tmp_path / "file" / "page.html"), "cannot be written"),
        ((folder, "--png", tmp_path / "file"), "cannot be written"),
    ):
        ran = spo("report", *arguments)
        assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
        assert words in ran.stderr
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ran = spo("report", folder)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "pip install 'spo-trainer[report]'" in ran.stderr


def test_a_browser_shows_it_without_a_complaint_and_without_a_request(spo: Spo, tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    report_of(spo, folder)
    try:
        with chromium() as browser:
            page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
            complaints: list[str] = []
            requests: list[str] = []
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto((folder / "report.html").as_uri())
            assert page.locator("svg.chart").count() == 4
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            assert (complaints, requests) == ([], [(folder / "report.html").as_uri()])
    except NoChromium as error:
        pytest.skip(str(error))


def test_runs_are_compared_on_the_terminal_and_as_a_page(spo: Spo, tmp_path: Path) -> None:
    for seed in range(3):
        finished_run(tmp_path / "runs" / f"mine-{seed}", seed=seed)
    finished_run(tmp_path / "runs" / "other", learner={"lr": 3e-4}, data={"system_prompt": HOSTILE})
    ran = spo("compare", tmp_path / "runs", "-o", tmp_path / "compared.html", "--threshold", "0.7")
    assert ran.returncode == 0
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("warning: the runs learn different tasks (data.system_prompt)")
    assert "\x1b[31m" not in ran.stdout
    for text in ("lr=1e-06", "50.0%", "75.0%", "to 70.0%", "learner.lr"):
        assert text in ran.stdout
    page = Page((tmp_path / "compared.html").read_text())
    assert_self_contained(page)
    assert set(page.ids) >= {"figures", "curves", "configuration", "accuracy", "reward"}
    assert "4 runs compared" in page.seen
    assert '<script>alert("run")</script>' in page.seen


def test_what_cannot_be_compared_is_one_line_and_exit_code_2(spo: Spo, tmp_path: Path) -> None:
    one, two = (finished_run(tmp_path / name) for name in ("one", "two"))
    for arguments, words in (
        ((one, one), "alone cannot be compared"),
        ((one, tmp_path / "three"), "does not exist"),
        ((one, two, "--group-by", "learner.lrr"), "did you mean learner.lr?"),
        ((one, two, "-o", one / "config.yaml" / "page.html"), "cannot be written"),
    ):
        ran = spo("compare", *arguments)
        assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
        assert words in ran.stderr
