"""What people see of a run: figures from Redis, the live frame, the plain line, the closing table."""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path

import msgpack
import pytest
import structlog
from redis.exceptions import ConnectionError
from rich.console import Console, RenderableType

from common.messages import Step
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from launcher import status as inspection
from launcher.quickstart.inputs import quickstart_config
from launcher.run.display import LiveView, PlainView, data_size, process_rows, render, sparkline
from launcher.run.progress import Pace, PhaseTimer, Progress, duration
from launcher.run.summary import Summary, next_steps, summarize, table
from launcher.run.supervisor import Supervisor


def text(shown: RenderableType, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def announce(broker: Broker, version: int, reward: float = 0.5) -> None:
    BatchInbox(broker).acquire(0).announce(
        Step(version=version, metrics={"reward/mean": reward, "staleness/mean": 1.5})
    )


def evaluate(broker: Broker, version: int, accuracy: float, **more: object) -> None:
    result = {"version": version, "accuracy": accuracy, "samples": 256, **more}
    broker.redis.hset(broker.key("evaluations"), str(version), msgpack.packb(result))


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path, structlog.get_logger())


def test_progress_follows_the_run_from_start_to_end(fake_broker: Broker) -> None:
    progress = Progress(fake_broker, steps=2)
    assert progress.refresh()
    assert (progress.phase(), progress.version) == ("engine start", 0)

    presence = Presence(fake_broker, "generator-1", "generator")
    presence.status(state="running", tokens_per_second=120.0)
    presence.beat()
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


def test_progress_keeps_what_it_knew_while_redis_is_away(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(fake_broker, steps=2)
    announce(fake_broker, 1)
    assert progress.refresh()

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(fake_broker.redis, "xread", away)
    assert not progress.refresh()
    assert progress.version == 1


def test_the_live_frame_shows_the_figures_and_every_process(fake_broker: Broker, supervisor: Supervisor) -> None:
    presence = Presence(fake_broker, "generator-7", "generator")
    presence.status(state="running", tokens_per_second=1234.0, version=3, episodes=56)
    presence.beat()
    announce(fake_broker, 3, reward=0.625)
    evaluate(fake_broker, 0, 0.25)
    progress = Progress(fake_broker, steps=9)
    progress.refresh()
    phases = PhaseTimer()
    phases.enter("training")
    shown = text(render("runs/x", progress, supervisor, phases))
    for piece in ("runs/x", "training", "step 3/9", "25.0%", "62.5%", "1.50 versions", "1,234/s", "generator-7", "56"):
        assert piece in shown


def test_the_frame_has_one_width_whatever_it_shows(fake_broker: Broker, supervisor: Supervisor) -> None:
    progress = Progress(fake_broker, steps=9)
    for width in (60, 96, 200):
        widths = set()
        for version in range(3):
            announce(fake_broker, version, reward=version / 3)
            progress.refresh()
            frame = render("runs/x", progress, supervisor, PhaseTimer(), width)
            widths |= {len(line) for line in text(frame, width).splitlines()}
        assert widths == {min(width, 100)}


def test_the_time_left_is_shown_once_the_pace_is_known(fake_broker: Broker, supervisor: Supervisor) -> None:
    progress = Progress(fake_broker, steps=9)
    for version in range(3):
        assert "left" not in text(render("runs/x", progress, supervisor, PhaseTimer()))
        announce(fake_broker, version)
        progress.refresh()
    assert re.search(r"about \d+ s left", text(render("runs/x", progress, supervisor, PhaseTimer())))


def test_rewards_of_another_range_are_numbers_beside_their_axis(fake_broker: Broker, supervisor: Supervisor) -> None:
    progress = Progress(fake_broker, steps=9, reward_range=(-1.0, 1.0))
    announce(fake_broker, 1, reward=-0.25)
    progress.refresh()
    shown = text(render("runs/x", progress, supervisor, PhaseTimer()))
    assert "-0.250" in shown
    assert "-1.000 to 1.000, 1 steps" in shown


def test_a_run_that_is_over_says_what_can_be_done_with_it(tmp_path: Path) -> None:
    for version in (9, 10):
        (tmp_path / f"checkpoints/step_{version}/hf").mkdir(parents=True)
    summary = Summary(True, 0.1, 0.9, 8, 10, {}, {}, {}, str(tmp_path))
    lines = next_steps(summary).splitlines()
    assert lines[0].endswith("checkpoints/step_10/hf")
    assert lines[1].endswith(f"spo report {tmp_path}")
    assert lines[2].endswith(f"spo dashboard {tmp_path}")
    assert f"spo run {tmp_path}/config.yaml -o run.steps=20" in lines[3]


def test_each_process_shows_where_its_weights_come_from_and_what_it_sent(
    fake_broker: Broker, supervisor: Supervisor
) -> None:
    for name, role, told in (
        ("learner", "learner", {"sent_bytes": 16_400_000_000}),
        ("relay-1", "relay", {"sent_bytes": 0, "source": "learner"}),
        ("generator-1", "generator", {"source": "relay-1"}),
    ):
        presence = Presence(fake_broker, name, role)
        presence.status(**told)
        presence.beat()
    progress = Progress(fake_broker, steps=2)
    progress.refresh()
    rows = {line.split()[0]: line for line in text(process_rows(progress, {})).splitlines() if line}
    assert "sent 16.4 GB" in rows["learner"]
    assert "from learner, sent 0 B" in rows["relay-1"]
    assert "from relay-1" in rows["generator-1"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (67_108_864, "67.1 MB"), (999_600_000, "1 GB"), (2.05e12, "2.0 TB")],
)
def test_sizes_are_shown_in_powers_of_a_thousand(count: float, shown: str) -> None:
    assert data_size(count) == shown


def test_a_sparkline_has_a_bar_for_each_value() -> None:
    assert sparkline([0.0, 0.5, 1.0, 7.0, -1.0]) == "▁▅██▁"
    assert sparkline([]) == ""


def test_the_plain_view_says_nothing_new_twice(fake_broker: Broker, supervisor: Supervisor) -> None:
    with structlog.testing.capture_logs() as lines:
        view = PlainView(structlog.get_logger(), every=0.0)
        progress = Progress(fake_broker, steps=4)
        for version in (1, 1, 2):
            if version != progress.version:
                announce(fake_broker, version)
            progress.refresh()
            view.update(progress, supervisor, PhaseTimer())
    assert [line["step"] for line in lines] == ["1/4", "2/4"]


def test_the_closing_table_and_its_file_tell_the_same(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    evaluate(fake_broker, 0, 0.15)
    evaluate(fake_broker, 2, 0.96)
    announce(fake_broker, 2)
    fake_broker.redis.hset(fake_broker.key("counters"), mapping={"dispatched": 1300, "counted": 1300})
    fake_broker.finish()
    progress = Progress(fake_broker, steps=2)
    progress.refresh()
    phases = PhaseTimer()
    with phases.during("training"):
        pass
    summary = summarize(progress, phases, supervisor, tmp_path)
    shown = text(table(summary))
    for piece in ("15.0% → 96.0%", "1,300 dispatched, 1,300 counted: each counted once", "training", "run finished"):
        assert piece in shown
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["accuracy_before"], written["accuracy_after"], written["finished"]) == (0.15, 0.96, True)


FIGURES = {
    "accuracy": 0.5, "reward": 0.625, "samples": 14.0, "set_aside": 2.0, "maj@2": 0.45, "pass@2": 0.8,
    "level=1/accuracy": 0.75, "level=1/reward": 0.875, "level=1/samples": 8.0, "level=1/set_aside": 0.0,
    "level=1/maj@2": 0.7, "level=1/pass@2": math.nan,
}  # fmt: skip


def test_status_and_closing_table_have_all_figures_of_the_newest_evaluation(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(fake_broker, 0, 0.1, figures={"accuracy": 0.1}, set_aside=0)
    evaluate(fake_broker, 3, 0.5, figures=FIGURES, set_aside=2)
    presence = Presence(fake_broker, "sampler", "sampler")
    presence.status(variance_ratio=0.78)
    presence.beat()
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    config = quickstart_config(tmp_path, seed=0, steps=8)
    progress = Progress(fake_broker, steps=8)
    progress.refresh()
    status = text(inspection.show(config))
    closing = text(table(summarize(progress, PhaseTimer(), supervisor, tmp_path)))
    for shown in (status, closing):
        rows = {line.strip("│ ┃║").split()[0]: line for line in shown.splitlines() if line.strip("│ ┃║")}
        assert all(figure in rows["data"] for figure in ("accuracy", "reward", "set aside", "maj@2", "pass@2"))
        assert all(figure in rows["level=1"] for figure in ("75.0%", "0.875", "70.0%", "–"))
        assert all(figure in rows["all"] for figure in ("50.0%", "0.625", "14", "2", "45.0%", "80.0%"))
        assert "saves 22% of the variance" in shown
    assert "evaluation of version 3" in status
    frame = text(render("runs/x", progress, supervisor, PhaseTimer()))
    assert [line.split()[4] for line in frame.splitlines() if "held-out set aside" in line] == ["2"]


def test_what_programs_get_is_json_also_where_nothing_was_measured(
    fake_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(fake_broker, 3, math.nan, figures=FIGURES)
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    facts = inspection.facts(quickstart_config(tmp_path, seed=0, steps=8))
    (result,) = json.loads(json.dumps(facts, allow_nan=False))["evaluations"]
    assert (result["accuracy"], result["figures"]["level=1/pass@2"], result["figures"]["pass@2"]) == (None, None, 0.8)


def test_the_share_of_degenerate_groups_is_shown_where_there_are_groups(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    for counters, shares in (({"counted": 9}, 0), ({"grouped": 64, "degenerate": 16}, 1)):
        fake_broker.redis.hset(fake_broker.key("counters"), mapping=counters)
        progress = Progress(fake_broker, steps=2)
        progress.refresh()
        frame = text(render("runs/x", progress, supervisor, PhaseTimer()))
        closing = text(table(summarize(progress, PhaseTimer(), supervisor, tmp_path)))
        for shown in (frame, closing):
            assert [("25.0%" in line) for line in shown.splitlines() if "degenerate groups" in line] == [True] * shares


def test_a_run_that_stopped_early_says_so(fake_broker: Broker, supervisor: Supervisor, tmp_path: Path) -> None:
    fake_broker.redis.hset(fake_broker.key("counters"), mapping={"dispatched": 9, "counted": 4})
    progress = Progress(fake_broker, steps=2)
    progress.refresh()
    shown = text(table(summarize(progress, PhaseTimer(), supervisor, tmp_path)))
    assert "run not finished" in shown
    assert "9 dispatched, 4 counted: some are still on their way" in shown


def test_phases_add_up_and_nest() -> None:
    phases = PhaseTimer()
    phases.enter("set-up")
    with phases.during("warm start"):
        assert phases.current == "warm start"
    assert phases.current == "set-up"
    phases.enter(None)
    assert set(phases.seconds) == {"set-up", "warm start"}
    assert phases.total() == pytest.approx(sum(phases.seconds.values()))


def test_warnings_of_the_processes_are_shown_and_logged_once(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    progress, file = Progress(fake_broker, steps=5), tmp_path / "generator-1.log"
    assert "no weights" not in text(render("runs/x", progress, supervisor, PhaseTimer()))
    file.write_text("12:00:00 [warning  ] no weights for 3 s role=generator-1\n")
    supervisor.notices.read("generator-1", file)
    frame = text(render("runs/x", progress, supervisor, PhaseTimer()))
    assert "generator-1: no weights for 3 s" in frame
    with structlog.testing.capture_logs() as entries:
        view = PlainView(structlog.get_logger())
        for _ in range(2):
            view.update(progress, supervisor, PhaseTimer())
    warned = [entry for entry in entries if entry["log_level"] == "warning"]
    assert [(entry["event"], entry["process"]) for entry in warned] == [("no weights for 3 s", "generator-1")]


def test_warnings_stay_on_the_screen_when_the_live_view_is_gone(
    fake_broker: Broker, supervisor: Supervisor, tmp_path: Path
) -> None:
    log = tmp_path / "generator-1.log"
    log.write_text("12:00:00 [warning  ] judge is slow [bold]5[/bold] role=generator\n")
    supervisor.notices.read("generator-1", log)
    screen = io.StringIO()
    view = LiveView(Console(file=screen, width=120), "runs/r")
    view.update(Progress(fake_broker, steps=2), supervisor, PhaseTimer())
    view.close()
    assert screen.getvalue().splitlines()[-1] == "warning: generator-1: judge is slow [bold]5[/bold]"


def seen(*versions: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, version in versions:
        pace.see(version, now)
    return pace


def test_one_step_says_nothing_two_say_how_long_the_others_take() -> None:
    assert seen().left(10, 0.0) is None
    assert seen((5.0, 1)).left(10, 6.0) is None
    assert seen((5.0, 1), (9.0, 3)).left(10, 9.0) == 14.0
    assert seen((5.0, 1), (9.0, 3)).left(10, 12.0) == 11.0


def test_a_step_that_takes_longer_than_all_rest_leaves_no_negative_time() -> None:
    assert seen((5.0, 1), (6.0, 2)).left(3, 60.0) == 0.0


def test_only_the_newest_steps_count() -> None:
    slow_then_fast = [(100.0 * version, version) for version in range(5)]
    slow_then_fast += [(400.0 + version, 4 + version) for version in range(1, 31)]
    assert seen(*slow_then_fast).left(44, 430.0) == 10.0


def test_a_learner_that_came_back_from_its_checkpoint_starts_the_estimate_anew() -> None:
    back = seen((0.0, 7), (1.0, 8), (2.0, 9), (30.0, 5))
    assert back.left(10, 30.0) is None
    back.see(6, 31.0)
    assert back.left(10, 31.0) == 4.0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (90000, "25 h 0 min")],
)
def test_a_duration_reads_as_people_say_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
