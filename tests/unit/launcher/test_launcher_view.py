"""What people see of a run: figures from Redis, the live frame, the plain line, the closing table."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest
import structlog
from redis.exceptions import ConnectionError
from rich.console import Console, RenderableType

from common import log as logs
from common.config import load_config
from common.messages import Step
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.early_stop import FIELD, EarlyStop
from common.streams.presence import Presence
from launcher import status as inspection
from launcher.evaluate.answer_run import BarView
from launcher.folder.time_budget import Split, duration
from launcher.quickstart.inputs import quickstart_config
from launcher.run.display import LiveView, PlainView, data_size, figures, process_rows, render, sparkline
from launcher.run.notices import AT_ONCE, DIFFERENT, MAX_IN_VIEW, Notices
from launcher.run.progress import PhaseTimer, Progress
from launcher.run.summary import evaluation_table, next_steps, summarize, table
from launcher.run.supervisor import Supervisor
from tests.support.run_folder import BEGAN, GPU, full_run, write_metrics

LOG = structlog.get_logger()


def text(shown: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


class Seen:
    """A run, as its processes tell of it on a fake Redis, and what people see of it."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker, self.folder = broker, folder
        self.supervisor, self.phases = Supervisor(folder, LOG), PhaseTimer()

    def announce(self, version: int, reward: float = 0.5, **more: float) -> None:
        metrics = {"reward/mean": reward, "staleness/mean": 1.5, **more}
        BatchInbox(self.broker).acquire(0).announce(Step(version=version, metrics=metrics))

    def evaluate(self, version: int, accuracy: float, **more: object) -> None:
        result = {"version": version, "accuracy": accuracy, "samples": 256, **more}
        self.broker.redis.hset(self.broker.key("evaluations"), str(version), msgpack.packb(result))

    def count(self, **counters: int) -> None:
        self.broker.redis.hset(self.broker.key("counters"), mapping=counters)

    def beat(self, name: str, **status: Any) -> None:
        presence = Presence(self.broker, name, name.partition("-")[0])
        presence.status(**status)
        presence.beat()

    def read(self, steps: int = 9, **options: Any) -> Progress:
        progress = Progress(self.broker, steps, **options)
        assert progress.refresh()
        return progress

    def live(self, progress: Progress | None = None, width: int = 120) -> str:
        """The live view."""
        return text(render("runs/x", progress or self.read(), self.supervisor, self.phases, width), width)

    def closing(self, progress: Progress | None = None) -> tuple[str, dict[str, Any]]:
        """The closing table, and its file."""
        summary = summarize(progress or self.read(), self.phases, self.supervisor, self.folder)
        summary.write(self.folder / "summary.json")
        return text(table(summary)), json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def run(fake_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    return Seen(fake_broker, tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "generator-1.log"


def add(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_samples_that_were_left_out_are_shown_until_the_end(run: Seen) -> None:
    def shown() -> list[str]:
        progress = run.read()
        with structlog.testing.capture_logs() as logs:
            PlainView(LOG).update(progress, run.supervisor, run.phases)
        lines = [*run.live(progress).splitlines(), *run.closing(progress)[0].splitlines()]
        return [str(log["left_out"]) for log in logs if "left_out" in log] + [one for one in lines if "left out" in one]

    run.announce(1, **{"batch/left_out": 0.0, "batch/samples": 32.0})
    assert shown() == []
    for version, left_out in ((2, 26.0), (2, 26.0), (3, 3.0)):  # the second with its checkpoint
        run.announce(version, **{"batch/left_out": left_out, "batch/samples": 32.0})
    plain, live, closing = shown()
    assert plain == "29"
    assert re.search(r"left out +29 +of 96 samples: their tokens were gone or unusable", live)
    assert re.search(r"left out .*29 of 96 samples: their tokens were gone or unusable", closing)


def test_progress_follows_the_run_and_keeps_what_it_knew(run: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = run.read(steps=2)
    assert (progress.phase(), progress.version) == ("engine start", 0)
    run.beat("generator-1", state="running", tokens_per_second=120.0)
    progress.refresh()
    assert (progress.phase(), progress.tokens_per_second()) == ("evaluation", 120.0)
    assert run.read(evaluates_first=False).phase() == "training"
    run.evaluate(0, 0.2)
    run.announce(1)
    progress.refresh()
    assert progress.phase() == "training"
    run.announce(2, reward=0.75)
    progress.refresh()
    assert (progress.phase(), progress.trained, list(progress.rewards)) == ("evaluation", True, [0.5, 0.75])
    assert not progress.finished
    run.broker.finish()
    progress.refresh()
    assert progress.finished
    monkeypatch.setattr(run.broker.redis, "xread", Mock(side_effect=ConnectionError("gone")))
    assert not progress.refresh()
    assert progress.version == 2


def test_the_live_frame_shows_the_figures_and_every_process(run: Seen) -> None:
    shape = {"version": 3, "episodes": 56, "playing": 48, "concurrency": 96, "source": "relay-1"}
    run.beat("generator-7", state="running", tokens_per_second=1234.0, **shape)
    run.announce(3, reward=0.625)
    run.evaluate(0, 0.25, set_aside=2)
    run.phases.enter("training")
    shown = run.live()
    for piece in ("runs/x", "training", "step 3/9", "25.0%", "62.5%", "1.50 versions", "1,234/s", "generator-7", "56",
                  "48 of 96"):  # fmt: skip
        assert piece in shown
    assert [line.split()[3] for line in shown.splitlines() if "held-out skipped" in line] == ["2"]
    assert "waiting for scores" not in shown
    run.beat("generator-7", state="running", scoring=1, **shape)
    shown = run.live(run.read(has_teacher=True))
    assert [line.split()[4] for line in shown.splitlines() if "waiting for scores" in line] == ["1"]
    # A mean reward outside 0 to 1 is a number beside its axis.
    run.announce(4, reward=-0.25)
    shown = run.live(run.read(reward_range=(-1.0, 1.0)))
    assert "-0.250" in shown
    assert "-1.000 to 1.000, 2 steps" in shown
    run.beat("learner", sent_bytes=16_400_000_000)
    run.beat("relay-1", sent_bytes=0, source="learner")
    rows = {line.split()[0]: line for line in text(process_rows(run.read(), {})).splitlines() if line}
    assert "sent 16.4 GB" in rows["learner"]
    assert "from learner, sent 0 B" in rows["relay-1"]
    assert "from relay-1" in rows["generator-7"]


def test_gpus_and_engines_are_shown_by_side(run: Seen) -> None:
    assert not {"GPU", "vLLM"} & set(re.split(r"\W+", run.live()))
    run.beat("learner", metrics=GPU | {"gpu/count": 4.0, "gpu/least_utilisation": 0.25})
    engine = {"engine/batch_size": 60.0, "engine/cache_used": 0.7, "engine/preemptions": 1.0}
    run.beat("generator-1", metrics={"gpu/count": 1.0, "gpu/memory_gb": 70.0} | engine)  # a slice has no utilisation
    run.beat("generator-2", metrics=GPU | {"gpu/count": 3.0, "engine/prefix_hits": 0.5} | engine)
    run.announce(1, **{"gpu/mfu": 0.41, "tokens/per_second_per_gpu": 5300.0})
    progress = run.read()
    progress.teacher_gpus = lambda: GPU
    words = " ".join(run.live(progress).replace("│", "").split())  # whatever is wrapped
    assert "learner 90% busy 4, the least busy 25%, 60 GB, 600 W, 5,300 tokens/s each, MFU 41% GPUs" in words
    assert "GPUs, generators 90% busy 4, the least busy 90%, 62 GB, 600 W GPUs" in words
    assert "GPUs, teachers 90% busy 1, 60 GB, 600 W vLLM" in words
    assert "vLLM 60.0 at once KV cache 70% full, prefix hits 50%, 2 preemptions" in words


def test_what_wastes_gpus_is_shown_instead_of_a_better_split(run: Seen) -> None:
    folder = full_run(run.folder / "mine", steps=24)
    progress = run.read(folder=folder)
    progress.split = Split(4, 4)
    assert "moving one GPU" in run.live(progress)
    for step in range(25, 45):
        write_metrics(folder, step, {"gpu/mfu": 0.01, "seconds/train": 20.0}, "learner", BEGAN + 30.0 * step)
        write_metrics(folder, step, {"generator/seconds": 30.0 * step}, "generator-1", BEGAN + 30.0 * step + 1)
    progress.refresh()
    frame = run.live(progress)
    assert re.search(r"fix first +low MFU", frame)
    assert "moving one GPU" not in frame
    plain = PlainView(LOG)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            plain.update(progress, run.supervisor, run.phases)
    assert len([line for line in logs if "learner.token_budget" in line["event"]]) == 1


def test_frames_have_one_width_and_the_time_left_once_known(run: Seen) -> None:
    progress = run.read()
    for version in range(3):
        run.announce(version, reward=version / 3)
        assert "left" not in run.live(progress)
        progress.refresh()
        for width in (60, 96, 200):
            assert {len(line) for line in run.live(progress, width).splitlines()} == {min(width, 100)}
    assert re.search(r"about \d+ s left", run.live(progress))


def test_warnings_are_shown_logged_once_and_left_on_the_screen(run: Seen, log: Path) -> None:
    progress, screen = run.read(steps=4), io.StringIO()
    assert "slow" not in run.live(progress)
    add(log, "12:00:00 [warning  ] judge is slow [bold]5[/bold] role=generator-1")
    run.supervisor.notices.read("generator-1", log)
    assert "generator-1: judge is slow" in run.live(progress)
    live = LiveView(Console(file=screen, width=120), "runs/r")
    live.update(progress, run.supervisor, PhaseTimer())
    live.close()
    assert screen.getvalue().splitlines()[-1] == "warning: generator-1: judge is slow [bold]5[/bold]"
    with structlog.testing.capture_logs() as lines:
        plain = PlainView(LOG, every=0.0)
        for version in (1, 1, 2):
            if version != progress.version:
                run.announce(version)
            progress.refresh()
            plain.update(progress, run.supervisor, PhaseTimer())
    assert [line["step"] for line in lines if line["log_level"] == "info"] == ["1/4", "2/4"]
    warned = [(line["event"], line["process"]) for line in lines if line["log_level"] == "warning"]
    assert warned == [("judge is slow [bold]5[/bold]", "generator-1")]
    with structlog.testing.capture_logs() as lines:
        for phase, answers in (("evaluation", "5/9"), ("evaluation", "5/9"), ("training", "8/9"), ("training", None)):
            run.phases.enter(phase)
            run.beat("sampler", evaluating=answers)
            progress.refresh()
            plain.update(progress, run.supervisor, run.phases)
            rows = [row.split()[3] for row in run.live(progress).splitlines() if "held-out answers" in row]
            assert rows == ([answers] if answers else [])
    assert [line.get("evaluated") for line in lines] == ["5/9", "8/9", None]


def test_the_closing_table_and_its_file_tell_the_same(run: Seen) -> None:
    phases, folder = run.phases, run.folder
    run.count(dispatched=9, counted=4)
    shown, _ = run.closing()
    assert "run stopped" in shown
    assert "9 dispatched, 4 counted: some are still on their way" in shown
    assert "degenerate groups" not in shown

    run.evaluate(0, 0.15)
    run.evaluate(10, 0.96)
    run.announce(10)
    run.count(dispatched=1300, counted=1300)
    run.broker.finish()
    phases.enter("set-up")
    with phases.during("training"):
        assert phases.current == "training"
    assert phases.current == "set-up"
    phases.enter(None)
    assert phases.total() == pytest.approx(sum(phases.seconds.values()))
    for version in (9, 10):
        (folder / f"checkpoints/step_{version}/hf").mkdir(parents=True)
    (folder / "checkpoints/step_11_mine/hf").mkdir(parents=True)  # a copy that a user made
    shown, written = run.closing()
    tasks = "1,300 dispatched, 1,300 counted: each counted once"
    for piece in ("15.0% → 96.0%", tasks, "training", "set-up", "run finished"):
        assert piece in shown
    assert (written["accuracy_before"], written["accuracy_after"], written["finished"]) == (0.15, 0.96, True)
    lines = next_steps(summarize(run.read(), phases, run.supervisor, folder)).splitlines()
    ends = ("checkpoints/step_10/hf", f"spo report {folder}", f"spo dashboard {folder}", "run.steps=20")
    assert all(line.endswith(end) for line, end in zip(lines, ends, strict=False))


def test_a_run_that_ends_early_says_why(run: Seen) -> None:
    stop = EarlyStop(0.83, 40, since=5, end=52)
    run.broker.redis.hset(run.broker.key("state"), FIELD, stop.pack())
    run.announce(45)
    progress = run.read(steps=100, stop_when=5)
    assert (progress.trained, progress.steps) == (False, 52)
    run.announce(52)
    assert progress.refresh()
    reason = "the held-out reward was no better for 5 evaluations: best 0.83 at step 40"
    with structlog.testing.capture_logs() as logs:
        PlainView(LOG).update(progress, run.supervisor, run.phases)
    assert (logs[0]["ends_early"], logs[0]["step"]) == (reason, "52/52")
    assert progress.trained
    assert re.search(r"ends early +at step 52 +the held-out reward was no better", run.live(progress))
    shown, written = run.closing(progress)
    assert (written["ended_early"], "ended early" in shown) == (reason, True)
    assert "-o run.stop_when=null" in next_steps(summarize(progress, run.phases, run.supervisor, run.folder))


@pytest.mark.parametrize(
    ("shares", "is_much"), [([0.0] + [0.5] * 3, True), ([0.1] * 9, False), ([0.0] * 40 + [0.4] * 5, True)]
)
def test_the_masked_share_is_shown_and_warned_of_above_a_quarter(run: Seen, shares: list[float], is_much: bool) -> None:
    for version, share in enumerate(shares, 1):
        run.announce(version, **{"rollout_corr/masked_fraction": share})
    progress = run.read(masked_advice="masked by preset icepop; try a smaller learner.lr")
    whole = f"{sum(shares) / len(shares):.1%}"
    frame = run.live(progress)
    assert re.search(rf"tokens masked +{shares[-1]:.1%} +by the correction; {whole} over all steps", frame)
    shown, written = run.closing(progress)
    assert re.search(rf"tokens masked +│ {whole}", shown)
    assert ("steps are masked by preset icepop; try a smaller learner.lr" in shown) == is_much
    assert (written["masked"], bool(written["masked_warning"])) == (pytest.approx(sum(shares) / len(shares)), is_much)


def test_a_reward_between_0_and_1_stands_beside_accuracy(run: Seen) -> None:
    run.evaluate(0, 0.25, reward=0.25)
    shown = text(figures(run.read())) + run.closing()[0]
    assert "held-out reward" not in shown, "accuracy says the same"
    run.evaluate(10, 0.5, reward=0.625)
    shown = text(figures(run.read()))
    assert "held-out reward" in shown
    assert "0.625" in shown
    shown, written = run.closing()
    assert "0.250 → 0.625" in shown
    assert (written["reward_before"], written["reward_after"]) == (0.25, 0.625)


def test_many_evaluations_without_an_answer_have_an_empty_curve(run: Seen) -> None:
    run.evaluate(0, 0.25, reward=0.625)
    for version in range(1, 41):
        run.evaluate(version, math.nan, reward=math.nan)
    assert re.search(r"held-out reward +–", run.live())


FIGURES = {
    "accuracy": 0.5, "reward": 0.625, "samples": 14.0, "set_aside": 2.0, "maj@2": 0.45, "pass@2": 0.8,
    "level=1/accuracy": 0.75, "level=1/reward": 0.875, "level=1/samples": 8.0, "level=1/set_aside": 0.0,
    "level=1/maj@2": 0.7, "level=1/pass@2": math.nan,
}  # fmt: skip


def test_all_figures_of_the_newest_evaluation_are_shown(run: Seen) -> None:
    run.evaluate(0, 0.1, figures={"accuracy": 0.1}, set_aside=0)
    run.evaluate(3, math.nan, figures=FIGURES, set_aside=2)
    run.beat("sampler", variance_ratio=0.78)
    run.count(grouped=64, degenerate=16)
    config = quickstart_config(run.folder, seed=0, steps=8)
    status = text(inspection.show(config))
    assert "evaluation of version 3" in status
    for shown in (status, run.closing()[0]):
        rows = {line.strip("│ ┃║").split()[0]: line for line in shown.splitlines() if line.strip("│ ┃║")}
        assert all(figure in rows["data"] for figure in ("accuracy", "reward", "aside", "maj@2", "pass@2"))
        assert all(figure in rows["level=1"] for figure in ("75.0%", "0.875", "70.0%", "–"))
        assert all(figure in rows["all"] for figure in ("50.0%", "0.625", "14", "2", "45.0%", "80.0%"))
        assert "saves 22% of the variance" in shown
        assert re.search(r"degenerate groups\W+25.0%", shown)
    # JSON has no NaN.
    (_, result) = json.loads(json.dumps(inspection.facts(config), allow_nan=False))["evaluations"]
    assert (result["accuracy"], result["figures"]["level=1/pass@2"], result["figures"]["pass@2"]) == (None, None, 0.8)


def test_status_and_live_view_name_the_page_s_bottleneck(run: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = full_run(run.folder / "mine")
    config = load_config(folder / "config.yaml")
    for shown in (run.live(run.read(folder=folder)), text(inspection.show(config))):
        assert re.search(r"bottleneck +learner +learner waits 5%, generators 60% of the last 11 steps", shown)
    assert inspection.facts(config)["bottleneck"]["side"] == "learner"
    assert "bottleneck" not in run.live()
    monkeypatch.setattr("launcher.folder.time_budget.RECENT", 11)
    progress = run.read(folder=folder)
    progress.split = Split(4, 4)
    words = " ".join(run.live(progress).replace("│", "").split())  # whatever is wrapped
    assert "GPUs, split 4 + 4 moving one GPU from generators to learner would make a step take" in words


def test_brackets_in_names_are_no_markup(run: Seen) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    summary = summarize(run.read(), run.phases, run.supervisor, Path("runs/a[lr]/b[/lr]"))
    console.print(table(replace(summary, heldout_figures={"accuracy": 1.0})))
    console.print(evaluation_table({"accuracy": 1.0}, "models/x[/lr]"))
    console.print(render("runs/y[/lr]", run.read(), run.supervisor, run.phases, 120))
    with closing(BarView(console, "answers[/lr]", 1)):
        pass
    shown = console.export_text()
    assert all(name in shown for name in ("runs/a[lr]/b[/lr]", "models/x[/lr]", "runs/y[/lr]"))


def test_numbers_read_as_people_say_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 67_108_864: "67.1 MB", 999_600_000: "1 GB", 2.05e12: "2.0 TB"}
    assert {size: data_size(size) for size in sizes} == sizes
    times = {0.4: "0 s", 89: "89 s", 90: "2 min", 3600: "60 min", 5400: "1 h 30 min", 90000: "25 h 0 min"}
    assert {seconds: duration(seconds) for seconds in times} == times
    assert (sparkline([0.0, 0.5, 1.0, 7.0, -1.0]), sparkline([])) == ("▁▅██▁", "")


# Warnings in the logs of a run's processes: shown once each, whatever is written beside them.


def noticed(notices: Notices, log: Path) -> list[str]:
    notices.read("generator-1", log)
    return [str(notice) for notice in notices.newest]


def test_warnings_and_errors_are_taken_from_among_all_else(log: Path) -> None:
    notices = Notices()
    notices.follow(log)
    add(log, "12:00:00 [info     ] started pid=1 role=generator-1", "Traceback (most recent call last):", "{not json")
    add(log, "12:00:01 [warning  ] set aside prompt='a' role=generator-1")
    add(log, "12:00:02 [error    ] failed role=generator-1")
    assert noticed(notices, log) == ["generator-1: set aside prompt='a'", "generator-1: failed"]


def test_logs_of_json_lines_are_read_too(log: Path) -> None:
    notices = Notices()
    entry = {"role": "generator-1", "event": "set aside", "level": "warning", "timestamp": "12:00"}
    entry["prompt"] = "a\x1b[2J"
    add(log, json.dumps(entry), json.dumps(entry | {"level": "info"}), "[]", "{}", '{"a": ' + "[" * 60_000)
    assert noticed(notices, log) == ["generator-1: set aside prompt='a\\x1b[2J'"]


def test_lines_that_differ_in_numbers_alone_are_counted(log: Path) -> None:
    notices = Notices()
    for second in range(5):
        add(log, f"12:00:0{second} [warning  ] no weights for {second} s role=generator-1")
        notices.read("generator-1", log)
    assert noticed(notices, log) == ["generator-1: no weights for 0 s (×5)"]
    assert len(notices.unseen) == 1


def test_an_earlier_start_is_over_and_half_a_line_is_waited_for(log: Path) -> None:
    add(log, "12:00:00 [warning  ] of the day before")
    notices = Notices()
    notices.follow(log)
    with log.open("a") as file:
        file.write("12:00:01 [warning  ] half a ")
    assert noticed(notices, log) == []
    add(log, "line")
    assert noticed(notices, log) == ["generator-1: half a line"]


def test_however_much_is_warned_of_it_is_bounded(log: Path) -> None:
    notices = Notices()
    notices.follow(log)
    for first in range(0, 3 * DIFFERENT, 20):
        add(log, *(f"12:00:00 [warning  ] {'x' * number} role=g" for number in range(first + 1, first + 21)))
        notices.read("generator-1", log)
    assert (len(notices.newest), len(notices.unseen)) == (MAX_IN_VIEW, DIFFERENT)
    add(log, "12:00:00 [warning  ] " + "y" * 3 * AT_ONCE)
    notices.read("generator-1", log)
    log.unlink()
    assert len(noticed(notices, log)) == MAX_IN_VIEW


def test_what_our_own_logger_writes_is_what_is_read(log: Path) -> None:
    logs.setup("generator-1", file=log).warning("set aside", prompt="a", reason="too long")
    notices = Notices()
    assert noticed(notices, log) == ["generator-1: set aside prompt=a reason='too long'"]
    structlog.reset_defaults()
