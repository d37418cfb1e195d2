"""`spo fork`: what it copies, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from common.files import checkpoint, tracker_path
from launcher.cli import app, main
from sampler.snapshots import write_snapshot
from sampler.state import SamplerState
from tests.support.sampler import make_config


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


def fork(run: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fork", str(run), str(run.parent / "second"), *arguments])
    return result.exit_code, result.output


def refused(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["spo", "fork", str(run), str(run.parent / "second"), *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_the_newest_pair_is_copied_under_the_new_name(run: Path) -> None:
    code, output = fork(run, "-o", "run.steps=9", "-o", "learner.lr=0.25")
    new = run.parent / "second"
    assert (code, f"spo run {new}/config.yaml --resume" in output.replace("\n", "")) == (0, True)
    values = yaml.safe_load((new / "config.yaml").read_text())
    assert (values["run"]["name"], values["run"]["experiment"]) == ("second", "second")
    assert (values["run"]["steps"], values["learner"]["lr"]) == (9, 0.25)
    assert (checkpoint(new, 4) / "deepspeed" / "states.pt").read_bytes() == b"tensors of 4"
    assert tracker_path(new, 4).read_bytes() == tracker_path(run, 4).read_bytes()
    assert not checkpoint(new, 2).exists()
    assert json.loads((new / "changes.jsonl").read_text())["from"] == str(run)


def test_a_copy_survives_what_becomes_of_the_first_run(run: Path) -> None:
    fork(run, "--step", "2", "-o", "run.steps=9")
    os.remove(checkpoint(run, 2) / "deepspeed" / "states.pt")
    assert (checkpoint(run.parent / "second", 2) / "deepspeed" / "states.pt").read_bytes() == b"tensors of 2"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--step", "6", "-o", "run.steps=9"], "has no checkpoint of step 6; it has 2, 4"),
        (["-o", "run.steps=4"], "run.steps = 4, and the checkpoint of"),
        (["-o", "run.stebs=4"], "did you mean run.steps?"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(
    run: Path,
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert line in refused(run, capsys, monkeypatch, *arguments)
    assert not (run.parent / "second").exists()


def test_a_folder_that_is_no_run_and_one_that_is_in_use_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is no run folder" in refused(run.parent, capsys, monkeypatch)
    (run.parent / "second").mkdir()
    (run.parent / "second" / "notes").touch()
    assert "exists already" in refused(run, capsys, monkeypatch)
