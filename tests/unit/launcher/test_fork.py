"""`spo fork`: what it copies, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from common.files import checkpoint, tracker_path
from sampler.snapshots import write_snapshot
from sampler.state import SamplerState
from tests.support.sampler import make_config
from tests.support.spo_command import Spo, spo_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 2 and 4, and one of step 6 that lacks the sampler's state."""
    config = make_config(tmp_path)
    folder = tmp_path / "first"
    folder.mkdir()
    values = config.model_dump(mode="json", by_alias=True)
    values["run"]["experiment"] = "first"
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for version in (2, 4, 6):
        place = checkpoint(folder, version)
        (place / "deepspeed").mkdir(parents=True)
        (place / "deepspeed" / "states.pt").write_bytes(b"tensors of %d" % version)
        (place / "checkpoint.json").write_text("{}")
        if version < 6:
            write_snapshot(tracker_path(folder, version), SamplerState(config, ["a", "b"]), keep=9)
    return folder


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spo:
    return spo_here(capsys, monkeypatch)


def test_the_newest_pair_is_copied_under_the_new_name(run: Path, spo: Spo) -> None:
    new = run.parent / "second"
    ran = spo("fork", run, new, "-o", "run.steps=9", "-o", "learner.lr=0.25")
    assert (ran.returncode, f"spo run {new}/config.yaml --resume" in ran.stdout.replace("\n", "")) == (0, True)
    values = yaml.safe_load((new / "config.yaml").read_text())
    assert (values["run"]["name"], values["run"]["experiment"]) == ("second", "second")
    assert (values["run"]["steps"], values["learner"]["lr"]) == (9, 0.25)
    # A copy: it survives what becomes of the first run.
    (checkpoint(run, 4) / "deepspeed" / "states.pt").unlink()
    assert (checkpoint(new, 4) / "deepspeed" / "states.pt").read_bytes() == b"tensors of 4"
    assert tracker_path(new, 4).read_bytes() == tracker_path(run, 4).read_bytes()
    assert not checkpoint(new, 2).exists()
    assert json.loads((new / "changes.jsonl").read_text())["from"] == str(run)
    assert spo("fork", run, run.parent / "third", "--step", 2, "-o", "run.steps=9").returncode == 0
    assert checkpoint(run.parent / "third", 2).exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["first", "second", "--step", "6", "-o", "run.steps=9"], "has no checkpoint of step 6; it has 2, 4"),
        (["first", "second", "-o", "run.steps=4"], "run.steps = 4, and the checkpoint of"),
        (["first", "second", "-o", "run.stebs=4"], "did you mean run.steps?"),
        ([".", "second"], "is no run folder"),
        (["first", "first"], "exists already"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(
    run: Path, arguments: list[str], line: str, spo: Spo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    ran = spo("fork", *arguments)
    assert (ran.returncode, line in ran.stderr) == (2, True), ran.stderr
    assert not (run.parent / "second").exists()
