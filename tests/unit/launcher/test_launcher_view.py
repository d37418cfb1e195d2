"""What people see of a run: figures from Redis, the live frame, the plain line, the closing table."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgpack
import pytest
import structlog
from redis.exceptions import ConnectionError
from rich.console import Console, RenderableType

from common.config import load_config
from common.messages import Step
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from launcher import status as inspection
from launcher.folder.time_budget import Pace, Split
from launcher.layout.gpus import Gpu
from launcher.quickstart.inputs import quickstart_config
from launcher.run.display import LiveView, PlainView, data_size, figures, process_rows, render, sparkline
from launcher.run.progress import PhaseTimer, Progress, duration
from launcher.run.summary import next_steps, summarize, table
from launcher.run.supervisor import Supervisor
from tests.support.run_folder import full_run


def text(shown: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def announce(broker: Broker, version: int, reward: float = 0.5, **more: float) -> None:
    metrics = {"reward/mean": reward, "staleness/mean": 1.5, **more}
    BatchInbox(broker).acquire(0).announce(Step(version=version, metrics=metrics))


def evaluate(broker: Broker, version: int, accuracy: float, **more: object) -> None:
    result = {"version": version, "accuracy": accuracy, "samples": 256, **more}
    broker.redis.hset(broker.key("evaluations"), str(version), msgpack.packb(result))


def count(broker: Broker, **counters: int) -> None:
    broker.redis.hset(broker.key("counters"), mapping=counters)


def beat(broker: Broker, name: str, **status: Any) -> None:
    presence = Presence(broker, name, name.partition("-")[0])
    presence.status(**status)
    presence.beat()


def read(broker: Broker, steps: int = 9, **options: Any) -> Progress:
    progress = Progress(broker, steps, **options)
    assert progress.refresh()
    return progress


def live_frame(progress: Progress, supervisor: Supervisor, phases: PhaseTimer | None = None, width: int = 120) -> str:
    """The live view as text."""
    return text(render("runs/x", progress, supervisor, phases or PhaseTimer(), width), width)


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path, structlog.get_logger())


def test_samples_that_were_left_out_are_shown_until_the_end(fake_broker: Broker, supervisor: Supervisor) -> None:
    inbox, phases = BatchInbox(fake_broker).acquire(0), PhaseTimer()

    def announce(version: int, left_out: float) -> None:
        inbox.announce(Step(version=version, metrics={"batch/left_out": left_out, "batch/samples": 32.0}))

    def shown(progress: Progress) -> list[str]:
        with structlog.testing.capture_logs() as logs:
            PlainView(structlog.get_logger()).update(progress, supervisor, phases)
        closing = table(summarize(progress, phases, supervisor, Path("runs/x")))
        lines = [*live_frame(progress, supervisor, phases).splitlines(), *text(closing).splitlines()]
        return [str(log["left_out"]) for log in logs if "left_out" in log] + [one for one in lines if "left out" in one]

    announce(1, 0)
    assert shown(read(fake_broker)) == []
    announce(2, 26)
    announce(2, 26)  # again, with its checkpoint
    announce(3, 3)
    plain, live, closing = shown(read(fake_broker))
    assert plain == "29"
    assert re.search(r"left out +29 +of 96 samples: their tokens were gone or unusable", live)
    assert re.search(r"left out .*29 of 96 samples: their tokens were gone or unusable", closing)


def test_a_run_that_is_not_evaluated_first_trains_at_once(fake_broker: Broker) -> None:
    beat(fake_broker, "generator-1", state="running")
    phases = [read(fake_broker, evaluates_first=first).phase() for first in (True, False)]
    assert phases == ["evaluation", "training"]


def test_progress_follows_the_run_and_keeps_what_it_knew(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = read(fake_broker, steps=2)
    assert (progress.phase(), progress.version) == ("engine start", 0)
    beat(fake_broker, "generator-1", state="running", tokens_per_second=120.0)
    progress.refresh()
    assert (progress.phase(), progress.tokens_per_second()) == ("evaluation", 120.0)
    evaluate(fake_broker, 0, 0.2)
    announce(fake_broker, 1)
    progress.refresh()
    assert progress.phase() == "training"
    announce(fake_broker, 2, reward=0.75)
    progress.refresh()
    assert (progress.phase(), progress.trained, list(progress.rewards)) == ("evaluation", True, [0.5, 0.75])
    assert not progress.finished
    fake_broker.finish()
    progress.refresh()
    assert progress.finished

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(fake_broker.redis, "xread", away)
    assert not progress.refresh()
    assert progress.version == 2


def test_the_live_frame_shows_the_figures_and_every_process(fake_broker: Broker, supervisor: Supervisor) -> None:
    shape = {"version": 3, "episodes": 56, "playing": 48, "concurrency": 96, "source": "relay-1"}
    beat(fake_broker, "generator-7", state="running", tokens_per_second=1234.0, **shape)
    announce(fake_broker, 3, reward=0.625)
    evaluate(fake_broker, 0, 0.25, set_aside=2)
    progress, phases = read(fake_broker), PhaseTimer()
    phases.enter("training")
    shown = live_frame(progress, supervisor, phases)
    for piece in ("runs/x", "training", "step 3/9", "25.0%", "62.5%", "1.50 versions", "1,234/s", "generator-7", "56",
                  "48 of 96"):  # fmt: skip
        assert piece in shown
    assert [line.split()[3] for line in shown.splitlines() if "held-out skipped" in line] == ["2"]
    assert "waiting for scores" not in shown
    beat(fake_broker, "generator-7", state="running", scoring=1, **shape)
    shown = live_frame(read(fake_broker, has_teacher=True), supervisor, phases)
    assert [line.split()[4] for line in shown.splitlines() if "waiting for scores" in line] == ["1"]
    # A mean reward outside 0 to 1 is a number beside its axis.
    announce(fake_broker, 4, reward=-0.25)
    shown = live_frame(read(fake_broker, reward_range=(-1.0, 1.0)), supervisor, phases)
    assert "-0.250" in shown
    assert "-1.000 to 1.000, 2 steps" in shown
    beat(fake_broker, "learner", sent_bytes=16_400_000_000)
    beat(fake_broker, "relay-1", sent_bytes=0, source="learner")
    rows = {line.split()[0]: line for line in text(process_rows(read(fake_broker), {})).splitlines() if line}
    assert "sent 16.4 GB" in rows["learner"]
    assert "from learner, sent 0 B" in rows["relay-1"]
    assert "from relay-1" in rows["generator-7"]


@pytest.mark.parametrize(
    ("count", "shown"), [(2, r"GPUs +50\.0% busy +0: 0% +1: 100%, 50% of their memory"), (16, r"50\.0% busy +▁█▁█")]
)
def test_the_load_of_each_gpu_is_shown(fake_broker: Broker, supervisor: Supervisor, count: int, shown: str) -> None:
    progress = read(fake_broker)
    assert "GPU" not in live_frame(progress, supervisor)
    progress.gpus = [Gpu(n, str(n), f"GPU-{n}", "H100", 80 << 30, 40 << 30, load=n % 2) for n in range(count)]
    assert re.search(shown, live_frame(progress, supervisor))


def test_frames_have_one_width_and_the_time_left_once_known(fake_broker: Broker, supervisor: Supervisor) -> None:
    progress = read(fake_broker)
    for version in range(3):
        announce(fake_broker, version, reward=version / 3)
        assert "left" not in live_frame(progress, supervisor)
        progress.refresh()
        for width in (60, 96, 200):
            frame = live_frame(progress, supervisor, width=width)
            assert {len(line) for line in frame.splitlines()} == {min(width, 100)}
    assert re.search(r"about \d+ s left", live_frame(progress, supervisor))


def test_warnings_are_shown_logged_once_and_left_on_the_screen(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    progress, file, screen = read(fake_broker, steps=4), tmp_path / "generator-1.log", io.StringIO()
    assert "slow" not in live_frame(progress, supervisor)
    file.write_text("12:00:00 [warning  ] judge is slow [bold]5[/bold] role=generator-1\n")
    supervisor.notices.read("generator-1", file)
    assert "generator-1: judge is slow" in live_frame(progress, supervisor)
    live = LiveView(Console(file=screen, width=120), "runs/r")
    live.update(progress, supervisor, PhaseTimer())
    live.close()
    assert screen.getvalue().splitlines()[-1] == "warning: generator-1: judge is slow [bold]5[/bold]"
    with structlog.testing.capture_logs() as lines:
        plain = PlainView(structlog.get_logger(), every=0.0)
        for version in (1, 1, 2):
            if version != progress.version:
                announce(fake_broker, version)
            progress.refresh()
            plain.update(progress, supervisor, PhaseTimer())
    assert [line["step"] for line in lines if line["log_level"] == "info"] == ["1/4", "2/4"]
    warned = [(line["event"], line["process"]) for line in lines if line["log_level"] == "warning"]
    assert warned == [("judge is slow [bold]5[/bold]", "generator-1")]
    with structlog.testing.capture_logs() as lines:
        for phase, answers in (("evaluation", "5/9"), ("evaluation", "5/9"), ("training", "8/9"), ("training", None)):
            phases = PhaseTimer()
            phases.enter(phase)
            beat(fake_broker, "sampler", evaluating=answers)
            progress.refresh()
            plain.update(progress, supervisor, phases)
            frame = live_frame(progress, supervisor, phases)
            rows = [row.split()[3] for row in frame.splitlines() if "held-out answers" in row]
            assert rows == ([answers] if answers else [])
    assert [line.get("evaluated") for line in lines] == ["5/9", "8/9", None]


def test_the_closing_table_and_its_file_tell_the_same(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    phases = PhaseTimer()
    count(fake_broker, dispatched=9, counted=4)
    shown = text(table(summarize(read(fake_broker), phases, supervisor, tmp_path)))
    assert "run stopped" in shown
    assert "9 dispatched, 4 counted: some are still on their way" in shown
    assert "degenerate groups" not in shown

    evaluate(fake_broker, 0, 0.15)
    evaluate(fake_broker, 10, 0.96)
    announce(fake_broker, 10)
    count(fake_broker, dispatched=1300, counted=1300)
    fake_broker.finish()
    phases.enter("set-up")
    with phases.during("training"):
        assert phases.current == "training"
    assert phases.current == "set-up"
    phases.enter(None)
    assert phases.total() == pytest.approx(sum(phases.seconds.values()))
    for version in (9, 10):
        (tmp_path / f"checkpoints/step_{version}/hf").mkdir(parents=True)
    summary = summarize(read(fake_broker), phases, supervisor, tmp_path)
    shown = text(table(summary))
    tasks = "1,300 dispatched, 1,300 counted: each counted once"
    for piece in ("15.0% → 96.0%", tasks, "training", "set-up", "run finished"):
        assert piece in shown
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["accuracy_before"], written["accuracy_after"], written["finished"]) == (0.15, 0.96, True)
    lines = next_steps(summary).splitlines()
    ends = ("checkpoints/step_10/hf", f"spo report {tmp_path}", f"spo dashboard {tmp_path}", "run.steps=20")
    assert all(line.endswith(end) for line, end in zip(lines, ends, strict=False))


@pytest.mark.parametrize(
    ("shares", "is_much"), [([0.0] + [0.5] * 3, True), ([0.1] * 9, False), ([0.0] * 40 + [0.4] * 5, True)]
)
def test_the_masked_share_is_shown_and_warned_of_above_a_quarter(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path, shares: list[float], is_much: bool
) -> None:
    for version, share in enumerate(shares, 1):
        announce(fake_broker, version, **{"rollout_corr/masked_fraction": share})
    progress = read(fake_broker, masked_advice="masked by preset icepop; try a smaller learner.lr")
    whole = f"{sum(shares) / len(shares):.1%}"
    frame = live_frame(progress, supervisor)
    assert re.search(rf"tokens masked +{shares[-1]:.1%} +by the correction; {whole} over all steps", frame)
    summary = summarize(progress, PhaseTimer(), supervisor, tmp_path)
    shown = text(table(summary))
    assert re.search(rf"tokens masked +│ {whole}", shown)
    assert ("steps are masked by preset icepop; try a smaller learner.lr" in shown) == is_much
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["masked"], bool(written["masked_warning"])) == (pytest.approx(sum(shares) / len(shares)), is_much)


def test_a_reward_between_0_and_1_stands_beside_accuracy(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    evaluate(fake_broker, 0, 0.25, reward=0.25)
    progress = read(fake_broker)
    shown = text(figures(progress)) + text(table(summarize(progress, PhaseTimer(), supervisor, tmp_path)))
    assert "held-out reward" not in shown, "accuracy says the same"
    evaluate(fake_broker, 10, 0.5, reward=0.625)
    progress = read(fake_broker)
    assert "held-out reward" in text(figures(progress))
    assert "0.625" in text(figures(progress))
    summary = summarize(progress, PhaseTimer(), supervisor, tmp_path)
    assert "0.250 → 0.625" in text(table(summary))
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["reward_before"], written["reward_after"]) == (0.25, 0.625)


FIGURES = {
    "accuracy": 0.5, "reward": 0.625, "samples": 14.0, "set_aside": 2.0, "maj@2": 0.45, "pass@2": 0.8,
    "level=1/accuracy": 0.75, "level=1/reward": 0.875, "level=1/samples": 8.0, "level=1/set_aside": 0.0,
    "level=1/maj@2": 0.7, "level=1/pass@2": math.nan,
}  # fmt: skip


def test_all_figures_of_the_newest_evaluation_are_shown(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(fake_broker, 0, 0.1, figures={"accuracy": 0.1}, set_aside=0)
    evaluate(fake_broker, 3, math.nan, figures=FIGURES, set_aside=2)
    beat(fake_broker, "sampler", variance_ratio=0.78)
    count(fake_broker, grouped=64, degenerate=16)
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    config = quickstart_config(tmp_path, seed=0, steps=8)
    status = text(inspection.show(config))
    assert "evaluation of version 3" in status
    for shown in (status, text(table(summarize(read(fake_broker), PhaseTimer(), supervisor, tmp_path)))):
        rows = {line.strip("│ ┃║").split()[0]: line for line in shown.splitlines() if line.strip("│ ┃║")}
        assert all(figure in rows["data"] for figure in ("accuracy", "reward", "aside", "maj@2", "pass@2"))
        assert all(figure in rows["level=1"] for figure in ("75.0%", "0.875", "70.0%", "–"))
        assert all(figure in rows["all"] for figure in ("50.0%", "0.625", "14", "2", "45.0%", "80.0%"))
        assert "saves 22% of the variance" in shown
        assert re.search(r"degenerate groups\W+25.0%", shown)
    # JSON has no NaN.
    (_, result) = json.loads(json.dumps(inspection.facts(config), allow_nan=False))["evaluations"]
    assert (result["accuracy"], result["figures"]["level=1/pass@2"], result["figures"]["pass@2"]) == (None, None, 0.8)


def test_status_and_live_view_name_the_page_s_bottleneck(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = full_run(tmp_path / "mine")
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    config = load_config(folder / "config.yaml")
    live = live_frame(read(fake_broker, folder=folder), supervisor)
    for shown in (live, text(inspection.show(config))):
        assert re.search(r"bottleneck +learner +learner waits 5%, generators 60% of the last 11 steps", shown)
    assert inspection.facts(config)["bottleneck"]["side"] == "learner"
    assert "bottleneck" not in live_frame(read(fake_broker), supervisor)
    monkeypatch.setattr("launcher.folder.time_budget.RECENT", 11)
    progress = read(fake_broker, folder=folder)
    progress.split = Split(4, 4)
    words = " ".join(live_frame(progress, supervisor).replace("│", "").split())  # whatever is wrapped
    assert "GPUs 4 + 4 moving one GPU from generators to learner would make a step take" in words


SLOW_THEN_FAST = [(100.0 * version, version) for version in range(5)]
SLOW_THEN_FAST += [(400.0 + version, 4 + version) for version in range(1, 31)]
BACK = [(0.0, 7), (1.0, 8), (2.0, 9), (30.0, 5)]  # a learner that resumed from its checkpoint


@pytest.mark.parametrize(
    ("seen", "steps", "now", "left"),
    [
        ([], 10, 0.0, None), ([(5.0, 1)], 10, 6.0, None), ([(5.0, 1), (9.0, 3)], 10, 9.0, 14.0),
        ([(5.0, 1), (9.0, 3)], 10, 12.0, 11.0), ([(5.0, 1), (6.0, 2)], 3, 60.0, 0.0),
        (SLOW_THEN_FAST, 44, 430.0, 10.0), (BACK, 10, 30.0, None), ([*BACK, (31.0, 6)], 10, 31.0, 4.0),
    ],
)  # fmt: skip
def test_the_newest_steps_say_how_long_the_rest_takes(
    seen: list[tuple[float, int]], steps: int, now: float, left: float | None
) -> None:
    pace = Pace()
    for at, version in seen:
        pace.see(version, at)
    assert pace.left(steps, now) == left


def test_numbers_read_as_people_say_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 67_108_864: "67.1 MB", 999_600_000: "1 GB", 2.05e12: "2.0 TB"}
    assert {size: data_size(size) for size in sizes} == sizes
    times = {0.4: "0 s", 89: "89 s", 90: "2 min", 3600: "60 min", 5400: "1 h 30 min", 90000: "25 h 0 min"}
    assert {seconds: duration(seconds) for seconds in times} == times
    assert (sparkline([0.0, 0.5, 1.0, 7.0, -1.0]), sparkline([])) == ("▁▅██▁", "")
