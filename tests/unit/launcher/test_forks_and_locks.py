"""Folders of runs and of processes: forked, exported, held by one command at a time, and gone with their process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from common.errors import UserError
from common.files import checkpoint, tracker_path
from launcher.run import folder_lock
from launcher.run.folder_lock import FolderInUse, locked
from learner.checkpoint.files import paths_in, sum_up, write_metadata
from sampler.files.snapshots import write_snapshot
from sampler.state import SamplerState
from tests.support.http_double import Handler, fails, raw, serve
from tests.support.run_folder import write_metrics
from tests.support.sampler import make_config
from tests.support.spo_command import Spo


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 2 and 4, and one of step 6 that lacks the sampler's state."""
    config = make_config(tmp_path)
    folder = tmp_path / "first"
    folder.mkdir()
    values = config.model_dump(mode="json", by_alias=True)
    values["run"]["experiment"] = "first"
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for version in (2, 4, 6):
        whole = checkpoint(folder, version)
        for kind in ("hf", "adapter"):
            (whole / kind).mkdir(parents=True)
            (whole / kind / "config.json").write_text(f"{kind} of {version}")
        write_metadata(whole, {"files": sum_up(whole, paths_in(whole))})
        if version < 6:
            write_snapshot(tracker_path(folder, version), SamplerState(config, ["a", "b"]), most=9)
    return folder


def test_the_newest_pair_is_forked_under_the_new_name(first: Path, spo: Spo) -> None:
    new = first.parent / "second"
    ran = spo("fork", first, new, "-o", "run.steps=9", "-o", "learner.lr=0.25")
    assert (ran.returncode, f"spo run {new}/config.yaml --resume" in ran.stdout.replace("\n", "")) == (0, True)
    values = yaml.safe_load((new / "config.yaml").read_text())
    assert (values["run"]["name"], values["run"]["experiment"]) == ("second", "second")
    assert (values["run"]["steps"], values["learner"]["lr"]) == (9, 0.25)
    # A copy: it survives what becomes of the first run.
    (checkpoint(first, 4) / "hf" / "config.json").unlink()
    assert (checkpoint(new, 4) / "hf" / "config.json").read_text() == "hf of 4"
    assert tracker_path(new, 4).read_bytes() == tracker_path(first, 4).read_bytes()
    assert not checkpoint(new, 2).exists()
    assert json.loads((new / "changes.jsonl").read_text())["from"] == str(first)
    asked = spo("status", new)
    assert (asked.returncode, "was not started yet: spo run" in asked.stderr) == (2, True), asked.stderr
    # Why not from the newest checkpoint.
    assert "from step 4 of" in ran.stdout
    assert "since checkpoints/tracker/step_6.npz of its newest step, 6, is missing" in ran.stdout.replace("\n", "")
    assert spo("fork", "first", "third", "--step", 2, "-o", "run.steps=9").returncode == 0
    assert checkpoint(first.parent / "third", 2).exists()


@pytest.mark.parametrize("name", ["2024", "1e5", "true", "2026-11-30"])
def test_a_name_that_looks_like_another_value_is_the_runs_name(first: Path, spo: Spo, name: str) -> None:
    new = first.parent / "\U0001f680: 1 #2" / name
    ran = spo("fork", first, new, "-o", "run.steps=9")
    assert (ran.returncode, ran.stderr) == (0, "")
    run = yaml.safe_load((new / "config.yaml").read_text())["run"]
    assert (run["name"], run["experiment"], run["output_dir"]) == (name, name, str(new.parent))


@pytest.mark.parametrize(
    ("options", "content"), [([], "hf of 6"), (["--step", 2], "hf of 2"), (["--adapter"], "adapter of 6")]
)
def test_the_newest_checkpoint_is_exported_by_default(
    first: Path, spo: Spo, options: list[object], content: str
) -> None:
    ran = spo("export", "first", "out", *options)
    assert (ran.returncode, "out" in ran.stdout) == (0, True), ran.stderr
    assert (first.parent / "out/config.json").read_text() == content


EVALUATED = {0: (0.125, 0.0), 2: (0.75, 0.5), 3: (0.875, 1.0), 4: (0.5, 0.25)}


def evaluate(folder: Path) -> None:
    for version, (reward, accuracy) in EVALUATED.items():
        write_metrics(folder, version, {"validation/reward": reward, "validation/accuracy": accuracy})


def test_the_best_evaluated_checkpoint_is_exported_with_a_card(first: Path, spo: Spo) -> None:
    refused = spo("export", "first", "out", "--best")
    assert (refused.returncode, "no version with a checkpoint in first was evaluated" in refused.stderr) == (2, True)
    evaluate(first)
    assert spo("export", "first", "out", "--best", "--card").returncode == 0
    assert (first.parent / "out/config.json").read_text() == "hf of 2"
    card = (first.parent / "out/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    assert "| 0 | 0.1250 | 0.0% |\n| 2 | 0.7500 | 50.0% |\n\n" in card
    assert "`none`, trained for 2 steps with SPO on train." in card
    assert str(first.parent) not in card, "paths say nothing to others"


def hub(handler: Handler, body: Any) -> None:
    """The Hugging Face hub's answers, as far as an upload asks."""
    address = f"http://{handler.headers['Host']}/me/maths"
    answers: dict[str, Any] = {
        "create": {"url": address, "id": "me/maths"},
        "preupload": {
            "files": [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in (body or {}).get("files", [])
            ]
        }
        if isinstance(body, dict)
        else {},
        "validate-yaml": {"errors": [], "warnings": []},
        "commit": {"success": True, "commitOid": "c0", "commitUrl": f"{address}/commit/c0"},
    }
    raw(handler, json.dumps(next((answers[part] for part in handler.path.split("/") if part in answers), {})).encode())


def test_a_model_is_pushed_with_its_card_and_is_private(first: Path, spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(first)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    with serve(hub) as double:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", double.url)
        ran = spo("export", "first", "out", "--push", "me/maths")
        assert (ran.returncode, "uploaded to" in ran.stdout) == (0, True), ran.stderr
    asked = dict(zip(double.paths, double.requests, strict=True))
    created = asked["/api/repos/create"]
    assert (created["name"], created["organization"], created["visibility"]) == ("maths", "me", "private")
    tokens = {value for sent in double.headers for name, value in sent.items() if name.lower() == "authorization"}
    assert tokens == {"Bearer hf_of_a_test"}
    commit = next(body for path, body in asked.items() if "/commit/" in path)
    files = {one["value"]["path"]: b64decode(one["value"]["content"]).decode() for one in commit[1:]}
    assert files["config.json"] == "hf of 6"
    assert files["README.md"] == (first.parent / "out/README.md").read_text()


def test_a_hub_that_refuses_is_one_line(first: Path, spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(fails(401, "{}")) as double:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", double.url)
        ran = spo("export", "first", "out", "--push", "me/maths")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "--push me/maths: " in ran.stderr
    assert "set HF_TOKEN" in ran.stderr
    assert (first.parent / "out/config.json").is_file(), "the export is kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fork", "first", "new", "--step", "6", "-o", "run.steps=9"], "has no checkpoint of step 6; it has 2, 4"),
        (["fork", "first", "new", "-o", "run.steps=4"], "run.steps = 4, but the checkpoint of"),
        (["fork", "first", "new", "-o", "run.stebs=4"], "did you mean run.steps?"),
        (["fork", ".", "new"], "is not a run folder"),
        (["fork", "first", "new #2", "-o", "run.steps=9"], "run.name = 'new #2': string should match pattern"),
        (["fork", "first", "first"], "exists already"),
        (["export", "nowhere", "new"], "nowhere is not a run folder: it has no config.yaml"),
        (["export", "first", "first/config.yaml"], "first/config.yaml exists already; name a new folder"),
        (["export", "first", "new", "--step", "2", "--best"], "--best and --step 2 each name a checkpoint"),
        (["export", "first", "new", "--step", "3"], "first has no checkpoint of step 3; it has 2, 4, 6"),
        (["export", "first", "first/config.yaml/new"], "first/config.yaml/new cannot be written: Not a directory"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line_and_leaves_no_folder(
    first: Path, spo: Spo, arguments: list[str], message: str
) -> None:
    ran = spo(*arguments)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert message in ran.stderr
    assert not (first.parent / "new").exists()


# A run folder belongs to one command at a time.

GONE = 2**22 + 1  # above the highest process id that Linux gives


def test_a_folder_is_one_commands_until_it_has_ended(tmp_path: Path) -> None:
    line = rf"run folder {tmp_path}/run is in use by process {os.getpid()} on {socket.gethostname()}, since 20"
    for _ in range(2):
        with (
            locked(tmp_path / "run", "--output"),
            pytest.raises(FolderInUse, match=rf"{line}.*choose another --output"),
            locked(tmp_path / "run", "--output"),
        ):
            pass


def test_what_a_killed_command_left_behind_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": GONE, "host": socket.gethostname(), "since": "2026-01-01 00:00:00"}))
    with path.open("a") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match=str(GONE)), locked(tmp_path, "--output", wait=0):
            pass
    with locked(tmp_path, "--output", wait=0):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_that_says_nothing_is_respected(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match="in use by another command"), locked(tmp_path, "--output", wait=0):
            pass


def test_a_lock_that_cannot_be_written_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(folder_lock.os, "write", full)
    with pytest.raises(UserError, match="cannot be written: No space left"), locked(tmp_path, "--output", wait=0):
        pass


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), locked(tmp_path / "file" / "run", "--output"):
        pass


# What processes keep among the temporary files goes with them, also where they are killed.

MAKES = """
import sys
from common.files import {0}
({0}() / "kept").write_text("x")
print({0}(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path is shorter than pytest's."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def started(temporary: Path, function: str = "own_folder") -> tuple[subprocess.Popen[str], Path]:
    """A process that has made its folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES.format(function)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"TMPDIR": str(temporary)}, cwd=Path.cwd(),
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.integration
def test_a_folder_goes_with_its_process_or_with_the_next(tmp_path: Path) -> None:
    living, its_own = started(tmp_path)
    killed, left = started(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.exists()
    last, third = started(tmp_path)
    assert not left.exists()
    assert (its_own / "kept").exists()
    for process in (living, last):
        process.communicate("", timeout=600)
    assert not its_own.exists()
    assert not third.exists()


@pytest.mark.integration
@pytest.mark.parametrize("length", [43, 44])
def test_a_folder_for_sockets_has_a_short_path_and_goes_with_its_process(length: int, short_path: Path) -> None:
    temporary = short_path / ("x" * (length - len(str(short_path)) - 1))
    temporary.mkdir()
    process, folder = started(temporary, "socket_folder")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/{uuid.uuid4()}")  # as vLLM names its sockets
    assert (folder.parent == temporary) == (length <= 43)
    process.communicate("", timeout=600)
    assert not folder.exists()
    assert length <= 43 or not list(temporary.iterdir())
