"""`spo report`: what a run has learned, its settings, time and counts, saved as a page that asks for nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.folder.evaluations import Evaluation, improvement, pairs
from launcher.folder.metrics import read_metrics
from launcher.folder.run import Run, read_one
from launcher.page import saved
from launcher.page.panels.configuration import version_rows
from launcher.page.panels.counts import balances
from launcher.page.panels.learning import reward_panel, summary_panel
from launcher.page.panels.speed import learner_rate
from tests.support.episode_rows import keep
from tests.support.run_folder import (
    COUNTERS,
    PANELS,
    SavedPage,
    add_evaluation,
    add_summary,
    add_tracker,
    change_config,
    finished_run,
    full_run,
    make_run,
    write_metrics,
)
from tests.support.spo_command import Spo

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\x1b[31m\x00\u202e\ud800"


def evaluated(folder: Path) -> tuple[Run, list[Evaluation]]:
    make_run(folder / "new")  # a run's configuration is not needed for its evaluations
    run = read_one(folder)
    return run, run.evaluations()


def report_of(spo: Spo, folder: Path) -> SavedPage:
    ran = spo("report", folder)
    assert (ran.returncode, ran.stderr, ran.stdout.split()) == (0, "", [str(folder / "report.html")])
    return SavedPage(folder / "report.html")


def test_improvement_is_over_prompts_answered_by_both(tmp_path: Path) -> None:
    add_evaluation(tmp_path, 0, {"a": [0, 1], "b": [0, 0], "gone": [1]})
    add_evaluation(tmp_path, 10, {"b": [1, 1], "a": [0, 0], "new": [0]})
    keep(tmp_path, 10, "e9", where="validation_data", kind="eval", prompt_id="b", status="set_aside", reward=0.0)
    (tmp_path / "validation_data/20.jsonl.part").write_bytes((tmp_path / "validation_data/0.jsonl").read_bytes())
    change = improvement(evaluated(tmp_path)[1])
    assert change is not None
    assert (change.first, change.last, change.prompts, change.better, change.worse) == (0, 10, 2, 1, 1)
    assert (change.before.mean, change.after.mean, change.change.mean) == (0.25, 0.5, 0.25)
    assert (change.change.low, change.change.high) == (-0.5, 1.0)


def test_rewards_between_0_and_1_have_a_chart_and_key_figures(tmp_path: Path) -> None:
    for name, right_from in (("whole", None), ("half", 0.5)):
        make_run(tmp_path / name, eval={"right_from": right_from})
        add_evaluation(tmp_path / name, 0, {"a": [0.0], "b": [0.5]})
        add_evaluation(tmp_path / name, 5, {"a": [0.25], "b": [0.5]})
    add_evaluation(tmp_path / "binary", 0, {"a": [0.0], "b": [1.0]})
    figures, charts = {}, {}
    for name in ("whole", "half", "binary"):
        run = read_one(tmp_path / name)
        evaluated = run.evaluations()
        figures[name] = dict(summary_panel(run, evaluated)["charts"][0]["rows"])
        charts[name] = {chart["name"]: chart for chart in reward_panel(run.metrics, evaluated)["charts"]}
    assert figures["whole"]["held-out accuracy after"].startswith("0.0%")
    assert figures["half"]["held-out accuracy after"].startswith("50.0%")
    for name in ("whole", "half"):
        assert figures[name]["held-out reward before"].startswith("0.250 (95%: 0.000 to 0.500), version 0")
        assert figures[name]["held-out reward after"].startswith("0.375 (95%: 0.250 to 0.500), version 5")
        assert charts[name]["heldout-reward"]["lines"][0]["y"] == [0.25, 0.375]
    assert not [row for row in figures["binary"] if "reward" in row]
    assert "heldout-reward" not in charts["binary"]


def test_prompts_are_chosen_by_how_much_their_reward_changed(tmp_path: Path) -> None:
    rose = {f"r{i}": 0.0 for i in range(7)}
    add_evaluation(
        tmp_path, 0, {"d": [0, 0], "b": [1, 0], "a": [1, 1], "e": [1, 1]} | {k: [v] for k, v in rose.items()}
    )
    add_evaluation(tmp_path, 5, {"d": [1, 1], "b": [1, 1], "a": [0, 1], "e": [1, 1]} | {k: [1] for k in rose})
    run, (first, last) = evaluated(tmp_path)
    assert [pair.prompt_id for pair in pairs(run.episodes, first, last, 1)] == ["d", "r0", "r1", "r2", "r3"]
    (worse,) = pairs(run.episodes, first, last, -1)
    # Of the responses with rewards 0 and 1 both are as near to their mean: the first.
    assert (worse.prompt_id, worse.rewards, worse.after["reward"]) == ("a", (1.0, 0.5), 0.0)


def test_a_prompt_whose_id_is_a_hash_is_shown_by_its_text(spo: Spo, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    long, chat, asked = "00112233445566aa", "maths/00112233445566bb", "00112233445566dd"
    unseen, named = "00112233445566cc", "row-7"
    keep(folder, 10, "t1", prompt_id=long, prompt="How\n much \x1b[31m" + "is " * 100)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    keep(folder, 11, "t2", prompt_id=chat, prompt=messages)
    keep(folder, 11, "t3", prompt_id=named, prompt="Its id says more")
    for version in (0, 10):
        add_evaluation(folder, version, {asked: [version / 10], named: [1 - version / 10]})
    add_tracker(folder, {long: 5, chat: 4, unseen: 3, named: 2})
    charts = report_of(spo, folder).charts
    drawn = charts["prompts"]
    assert [row[0] for row in drawn["rows"]] == [long, chat, unseen, named], "the ids stay in the data"
    text, *others = drawn["texts"]
    assert re.fullmatch(r"How much \\x1b\[31mis( is)+", text)
    assert 200 < len(text) < 250
    assert others == ["2 + 2?", None, None]
    shown = [(pair["prompt_id"], pair["prompt"]) for pair in charts["pairs"]["pairs"]]
    assert shown == [(asked, f"question {asked}"), (named, named)]


def test_a_broken_file_takes_away_what_it_had_and_no_more(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    chaos = folder / "chaos.json"
    chaos.write_text('{"checks": []}')
    for path in (*folder.glob("*.json*"), folder / "config.yaml", folder / "validation_data/6.jsonl"):
        name, whole = path.name, path.read_bytes()
        is_lines = name.endswith("jsonl")
        for text in (b'{"half', b"\xff\xfe\n\n", None):
            path.unlink() if text is None else path.write_bytes(text)
            run = read_one(folder)
            assert bool(run.values) == (name != "config.yaml")
            assert run.state == ("finished" if name != "summary.json" else "stopped")
            assert len(run.evaluations()) == (2 if name == "6.jsonl" else 3)
            assert bool(run.versions) == (name != "versions.jsonl")
            page = saved.saved_data([run])
            assert [panel["name"] for panel in page["panels"]["mine"]] == list(PANELS)
            # The last line of a file may still be on its way.
            is_damaged = is_lines and (text or b"").endswith(b"\n")
            assert bool(page["runs"][0]["notes"]) == (is_damaged or name == "config.yaml")
        path.write_bytes(whole)


def test_a_summary_of_an_earlier_start_is_not_that_of_the_run(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "mine")
    change_config(folder, run={"steps": 20})
    assert (read_one(folder).state, read_one(folder).step) == ("stopped", 6)
    write_metrics(folder, 7, {"seconds/train": 0.5}, "learner")
    assert (read_one(folder).state, read_one(folder).step) == ("stopped", 7)


def test_the_counts_balance_where_all_was_counted() -> None:
    def holds(counters: dict[str, int], is_over: bool) -> list[str]:
        return [result[0] for _, _, result in balances(counters, is_over)]

    lost = COUNTERS | {"counted": 59}
    assert holds(COUNTERS, True) == ["✓", "✓", "✓"]
    assert holds(lost, True) == ["✗", "✗", "✓"]
    assert holds(lost, False) == ["t", "t", "t"], "the run goes on"
    assert holds(COUNTERS | {"batched": 50}, True)[2] == "✗"
    assert balances({}, is_over=True) == []


def test_versions_are_by_process_with_later_changes() -> None:
    lines = [
        {"process": "sampler", "python": "3.11.7", "packages": {"redis": "8.0.0"}},
        {"process": "learner", "python": "3.11.7", "packages": {"torch": "2.13.0"}},
        {"process": "sampler", "python": "3.11.7", "packages": {"redis": "8.1.0"}},
        {"process": "generator-1", "python": "3.11.7", "packages": {"torch": "2.13.0"}},
        {"process": "generator-2", "packages": "nonsense"},
    ]
    rows = dict(version_rows(lines))
    assert rows["python"] == "sampler, learner, generator-1: 3.11.7; generator-2: –"
    assert rows["redis"] == "sampler: 8.0.0, then 8.1.0; learner, generator-1, generator-2: –"
    assert rows["torch"] == "sampler, generator-2: –; learner, generator-1: 2.13.0"


def test_the_learner_s_rate_is_by_the_whole_time_of_its_steps(tmp_path: Path) -> None:
    for version, wait in ((1, 6.0), (2, 0.0), (4, 14.0)):
        values = {"tokens/total": 40.0, "seconds/wait": wait, "seconds/train": 2.0}
        write_metrics(tmp_path, version, values, "learner")
    for version in (4, 5):
        write_metrics(tmp_path, version, {"seconds/checkpoint": 4.0}, "learner")
    rate = learner_rate(read_metrics(tmp_path))
    assert (rate.versions.tolist(), rate.values.tolist()) == ([1, 2, 4], [40 / 8, 80 / 10, 120 / 30])


def test_the_page_of_a_finished_run_has_everything(spo: Spo, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    finished_run(folder, learner={"lr": 3e-4}, data={"train": str(folder / "in.jsonl")})
    change_config(folder, learner={"gone": 5})
    (folder / "changes.jsonl").write_text('{"step": 3, "key": "run.steps", "from": 4, "to": 6, "time": 1}\n')
    page = report_of(spo, folder)
    rows: dict[str, list[list[Any]]] = {name: chart.get("rows", []) for name, chart in page.charts.items()}
    figures = dict(rows["key-figures"])
    assert figures["held-out accuracy before"].startswith("50.0% (95%: 0.0% to 100.0%)")
    assert figures["difference"].startswith("+25.0 points")
    shown = (figures["steps"], figures["samples"], figures["tokens trained on"], figures["time"], figures["state"])
    assert shown == ("6 of 6", "48", "600", "60 s", "finished")
    changed = {row[0]: row[1:] for row in rows["differing"]}
    assert (changed["learner.lr"], changed["learner.gone"][0]) == (["0.0003", "1e-06"], "5")
    assert (changed["data.train"][0], "run.name" in changed) == ("RUN/in.jsonl", False)
    assert rows["changes"] == [["3", "run.steps", "4", "6"]]
    assert rows["time-learner"][0] == ["waiting for a batch", "12 s", "20.0%"]
    assert rows["balances"][0] == ["dispatched = counted + on their way", "60 = 60 + 0", "✓ holds"]
    assert page.charts["accuracy"]["lines"][0]["low"][0] == 0.0
    chosen = [(pair["kind"], pair["prompt_id"]) for pair in page.charts["pairs"]["pairs"]]
    assert chosen == [("improved", "a"), ("worse", "b")]
    assert len(page.data["episodes"]["mine"]) == 12
    # What is wrong with the Redis of a run that is not over is reported without its password.
    assert "hunter2" not in json.dumps(report_of(spo, full_run(tmp_path / "full")).data)


def test_what_others_wrote_is_data_of_the_page_and_no_markup(spo: Spo, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", data={"system_prompt": HOSTILE.replace("\ud800", "")}, run={"name": "x"})
    messages = [{"role": "assistant", "content": HOSTILE}, {"role": HOSTILE, "name": HOSTILE, "content": [HOSTILE]}]
    named = HOSTILE.replace("\ud800", "")
    add_evaluation(folder, 0, {named: [0.0]}, messages=messages, gts=HOSTILE)
    add_evaluation(folder, 6, {named: [1.0]}, messages=messages, gts=HOSTILE)
    write_metrics(folder, 0, {f"validation/{HOSTILE}/accuracy": 0.5, "reward/mean": math.nan})
    write_metrics(folder, 0, {"generator/tokens_per_second": 1.0}, HOSTILE)
    add_summary(folder, counters={HOSTILE: 1, "dispatched": 1}, seconds={HOSTILE: 1.0})
    (folder / "versions.jsonl").write_text('{"process": "<b>", "python": "<i>", "packages": {"<u>": "<s>"}}\n')
    (folder / "chaos.json").write_text('{"checks": [{"name": "<b>", "problem": "<i>"}]}')
    page = report_of(spo, folder)
    text = json.dumps(page.data, ensure_ascii=False)
    assert text.count("</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\\\\x1b[31m\\\\x00") >= 8
    assert not set("\x1b\x00\u202e\ud800") & set(text)


def test_too_many_episodes_leave_some_of_all_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(tmp_path / "mine")
    for i in range(400):
        keep(folder, i // 100, f"t{i}", {"messages": [{"role": "assistant", "content": "long " * 100}]})
    monkeypatch.setattr(saved, "EPISODE_BYTES", 100_000)
    data = saved.saved_data([read_one(folder)])
    kept = data["episodes"]["mine"]
    assert 20 < len(kept) < 200
    assert {row["step"] for row in kept} == {0, 1, 2, 3, 6}
    charts = [chart for panel in data["panels"]["mine"] for chart in panel["charts"]]
    sides = [side for chart in charts for pair in chart.get("pairs", ()) for side in pair["sides"]]
    assert {(side["file"], side["offset"]) for side in sides} <= {(row["file"], row["offset"]) for row in kept}
    assert data["runs"][0]["notes"] == [f"{len(kept)} of 412 episodes are in this file, evenly spread"]
