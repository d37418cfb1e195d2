"""`spo run` on stand-ins for GPUs: two ranks train on the CPU and a teacher scores; each is started again if killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config.run import BrokerConfig
from common.streams.broker import connect
from launcher.folder.metrics import read_metrics
from tests.conftest import RedisServer
from tests.support.gpus import StandInGpus
from tests.support.waiting import PATIENCE
from tests.support.whole_run import pid_of, save_model, settled_counters, spo, wait_for_version, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# The packages here compute on the CPU, which the layout is not to know.
SPO = "import launcher.layout.layout as one; one.cpu_build = lambda role: None; from launcher.cli import main; main()"
STEPS, BATCH = 6, 16


def test_killed_ranks_are_started_again_together_and_a_killed_teacher_alone(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandInGpus(tmp_path / "bin", monkeypatch).are(4)
    sections = {
        "run": {"steps": STEPS, "journal": True},
        "sampler": {"batch_size": BATCH},
        "episode": {"max_response_tokens": 8},
        "learner": {"zero_stage": 2, "checkpoint_every": 1},
        "teacher": {"model": str(save_model(tmp_path / "teacher", seed=1))},
    }
    path = write_run(tmp_path, "ranks", sections)
    broker = connect(BrokerConfig(url=redis_server.url, dead_after=3.0), "ranks")
    words = ["run", str(path), "--redis", redis_server.url, "--learner-gpus", "1-2", "--generator-gpus", "0", "--plain"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", SPO, *words], stdout=log, stderr=log)
    try:
        wait_for_version(broker, 1, process)
        first = ranks_of(process.pid)
        assert {rank: environment["CUDA_VISIBLE_DEVICES"] for rank, (_, environment) in first.items()} == {
            "0": "1,2",
            "1": "1,2",
        }
        teacher = pid_of(tmp_path / "log", "teacher")
        assert psutil.Process(teacher).environ()["CUDA_VISIBLE_DEVICES"] == "3"
        for killed in (teacher, first["1"][0]):
            os.kill(killed, signal.SIGKILL)
        assert process.wait(5 * PATIENCE) == 0, (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE)
    assert not any(psutil.pid_exists(pid) for pid, _ in first.values())
    summary = json.loads((tmp_path / "runs" / "ranks" / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (STEPS, {"learner": 1, "teacher": 1})
    counters = settled_counters(broker)
    assert counters["finished"] >= counters["batched"] == STEPS * BATCH
    shares = read_metrics(tmp_path / "runs" / "ranks").series("teacher/tokens", "learner").values.tolist()
    assert (len(shares), max(shares)) == (STEPS, 1.0)  # 0 where the correction has rejected all tokens
    audited = spo("audit", "-c", path, "-o", f"broker.url={redis_server.url}")
    assert audited.returncode == 0, audited.stdout
    said = (tmp_path / "log").read_text()
    assert "learner: GPU 1-2 (NVIDIA H100 80GB HBM3), 2 ranks, ZeRO 2" in said
    assert "generator-1: GPU 0 (NVIDIA H100 80GB HBM3)" in said
    assert "teacher: GPU 3 (NVIDIA H100 80GB HBM3)" in said


def ranks_of(launcher: int) -> dict[str, tuple[int, dict[str, str]]]:
    """Process id and environment of each rank below a process, by its number."""
    ranks: dict[str, tuple[int, dict[str, str]]] = {}
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            environment = child.environ() if "learner.cli" in child.cmdline() else {}
        except psutil.NoSuchProcess:  # such as a compiler that vLLM has started
            continue
        if "RANK" in environment:
            ranks.setdefault(environment["RANK"], (child.pid, environment))  # what a rank forks comes after it
    return ranks
