"""Runs that Python starts: beside an event loop, with exceptions, and until the interpreter ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import spo
from launcher.checks import start
from launcher.run.folder_lock import locked
from launcher.run.processes import interruptible
from tests.support.scripted_run import EVALUATE, FOREVER, SAVE, UNTIL_FINISHED, Scripted

ROOT = Path(__file__).parents[3]
# A learner that trains these steps.
TRAINS = """
from common.messages import Step
from common.streams.batches import BatchInbox
inbox = BatchInbox(broker).acquire(0)
for version in {}: inbox.announce(Step(version=version, metrics={{"reward/mean": version / 10}}))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(start, "check_before_start", lambda _: None)  # the processes are scripts
    return Scripted(tmp_path, monkeypatch)


def test_a_notebook_starts_follows_stops_and_continues_a_run(run: Scripted) -> None:
    run.plays(FOREVER, learner=TRAINS.format((1, 2)) + FOREVER)

    async def cell() -> None:
        started = spo.run(run.config, generators=1)
        steps = iter(started)
        assert [next(steps), next(steps)] == [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}]
        with pytest.raises(TimeoutError):
            started.wait(timeout=0)
        with pytest.raises(spo.UserError, match=r"in use by process \d+ on .*, since .* \(this process\)"):
            spo.run(run.config, generators=1)
        (address,) = re.findall('href="(.*?)"', started._repr_html_())
        with httpx.Client(base_url=address.partition("?")[0], follow_redirects=True) as browser:
            browser.get(address)  # sets a cookie, in place of the token
            assert browser.get("api/panels", params={"run": "quickstart-1"}).status_code == 200
        started.stop()
        assert [*steps] == []
        assert (started.wait().finished, started.wait().steps, started.running) == (False, 2, False)

    asyncio.run(cell())
    run.plays(EVALUATE, learner=f"{TRAINS.format((3,))}\n{UNTIL_FINISHED}\n{SAVE}")
    with spo.run(run.config, generators=1) as continued:
        assert [step["step"] for step in continued] == [3]
    assert continued.wait().finished


def test_what_ends_a_run_is_raised_where_it_is_followed(run: Scripted) -> None:
    run.plays(FOREVER, FOREVER, learner="print('error: cannot read model.path x'); sys.exit(2)")
    with pytest.raises(spo.UserError, match=r"learner: cannot read model\.path x"):
        [*spo.run(run.config, generators=1)]
    run.plays(FOREVER, FOREVER, **{"generator-1": ""})
    with pytest.raises(spo.EndedEarly, match="all generator processes have exited"):
        spo.run(run.config, generators=1).wait()
    run.plays(FOREVER, FOREVER)
    with pytest.raises(ZeroDivisionError), spo.run(run.config, generators=1) as started:
        _ = 1 / 0
    assert not started.running


def test_the_signals_of_a_command_interrupt_it_once() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def stopped() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGHUP)  # while it stops its processes

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert signal.getsignal(signal.SIGTERM) is before


PROGRAM = """
import os, signal, sys
from pathlib import Path
import pytest, spo
from launcher.checks import start
from tests.support.scripted_run import FOREVER, Scripted, bell
patch = pytest.MonkeyPatch()
patch.setattr(start, "check_before_start", lambda _: None)
run = Scripted(Path(sys.argv[1]), patch)
ready = bell(run.folder / "ready")
run.plays(f"open({str(ready)!r}, 'w')\\n" + FOREVER, FOREVER)
spo.run(run.config, generators=1)
ready.read_text()
"""


@pytest.mark.parametrize(("end", "code"), [("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
def test_no_process_outlives_the_interpreter(end: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM + end, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, ended.stderr
    folder = tmp_path / "quickstart-1"
    with locked(folder, "run.experiment"):  # which all processes of a run hold
        assert (folder / "summary.json").exists() == (code == 1)
    if code == 1:
        assert json.loads((folder / "summary.json").read_text())["error"] is None
