"""`spo export`: which checkpoint it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import dump_config, parse_config
from common.files import checkpoint
from learner.checkpoint_files import paths_in, sum_up, write_metadata
from tests.support.spo_command import Spo, spo_here


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spo:
    return spo_here(capsys, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 2 and 4, each with an adapter and an export."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(parse_config({"model": {"path": "m"}, "data": {"train": "t"}})))
    for version in (2, 4):
        for kind in ("hf", "adapter"):
            (checkpoint(folder, version) / kind).mkdir(parents=True)
            (checkpoint(folder, version) / kind / "config.json").write_text(f"{kind} of {version}")
        whole = checkpoint(folder, version)
        write_metadata(whole, {"files": sum_up(whole, paths_in(whole))})
    return folder


@pytest.mark.parametrize(
    ("options", "content"),
    [([], "hf of 4"), (["--step", 2], "hf of 2"), (["--adapter"], "adapter of 4")],
)
def test_the_newest_checkpoint_is_taken_unless_another_is_named(
    spo: Spo, run: Path, tmp_path: Path, options: list[object], content: str
) -> None:
    ran = spo("export", run, tmp_path / "out", *options)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out/config.json").read_text() == content
    assert str(tmp_path / "out") in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out"], "nowhere is no run folder: it has no config.yaml"),
        (["mine", "mine"], "mine exists already; name a new folder"),
        (["mine", "mine/config.yaml"], "mine/config.yaml exists already; name a new folder"),
        (["mine", "out", "--step", 3], "mine has no checkpoint of step 3; it has 2, 4"),
        (["mine", "mine/config.yaml/out"], "mine/config.yaml/out cannot be written: Not a directory"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    spo: Spo, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = spo("export", *arguments)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert message in ran.stderr
