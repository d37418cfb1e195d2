"""A program's input and results, here and over HTTP; and what is left when it, its caller or its worker ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_client import CommandStatus, RequestRefused, RunCodeRequest, RunCodeResponse, SandboxUnavailable, Status
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings
from tests.support.event_loop import cancelled, in_event_loop, within
from tests.support.sandbox import FOREVER, SandboxUnderTest, programs_of, workers_of
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("bubblewrap")

ONE = Settings(workers=1)
ORDINARY = """
    import asyncio, getpass, multiprocessing, os, pathlib, random, socket, sqlite3, subprocess, tempfile

    if __name__ == "__main__":
        with multiprocessing.Pool(2) as pool:
            assert pool.map(abs, range(5)) == [0, 1, 2, 3, 4]
        assert subprocess.run(["sh", "-c", "seq 3 | sort -r | head -1"], capture_output=True).stdout == b"3\\n"
        here, there = socket.socketpair()
        here.sendall(b"x")
        assert there.recv(1) == b"x" and asyncio.run(asyncio.sleep(0, "x")) == "x"
        value = multiprocessing.Value("i", 7)
        assert open("/dev/zero", "rb").read(3) == bytes(3) and multiprocessing.Manager().list([value.value])[0] == 7
        with sqlite3.connect("data.db") as database, tempfile.NamedTemporaryFile() as file:
            database.execute("create table t (x)")
            file.write(b"x")
        assert pathlib.Path.home() == pathlib.Path("/tmp") and getpass.getuser() == "sandbox"
        assert os.path.expanduser("~sandbox") == "/tmp" and random.SystemRandom().random() < 1
        print("ä", os.getcwd(), __name__, __file__)
"""
BASH = 'read x; echo "$x $(python3 -c "print(6*7)") $((1+1))"; yes | head -1; for i in {1..3}; do echo -n $i; done'
LONG = "0123456789" * 300_000
# Request, return code, stdout, a part of stderr; the code is None at a time limit.
PROGRAMS: dict[str, tuple[dict[str, Any], int | None, str, str]] = {
    "output": ({"code": "import sys; print(input() * 2); sys.stderr.write('e')", "stdin": "ab\n"}, 0, "abab\n", "e"),
    "exit code": ({"code": "raise SystemExit(3)"}, 3, "", ""),
    "SIGSEGV": ({"code": "import os; os.kill(os.getpid(), 11)"}, 139, "", ""),
    "time limit": (
        {"code": "echo early; echo also >&2; sleep 1000", "language": "bash", "run_timeout": 1.0},
        *(None, "early\n", "also\n"),
    ),
    "ordinary": ({"code": ORDINARY}, 0, "ä /tmp/run __main__ /tmp/run/program.py\n", ""),
    "bash": ({"code": BASH, "language": "bash", "stdin": "in"}, 0, "in 42 2\ny\n123", ""),
    "long stdin": ({"code": "import sys; print(len(sys.stdin.read()))", "stdin": LONG}, 0, "3000000\n", ""),
}


def program(code: str, **values: Any) -> RunCodeRequest:
    """A request with patience for a busy machine."""
    return RunCodeRequest(**{"code": textwrap.dedent(code), "run_timeout": 60.0, "memory_limit_MB": 512, **values})


def output(answer: RunCodeResponse) -> str:
    assert answer.status is Status.SUCCESS, answer
    assert answer.run_result is not None
    return answer.run_result.stdout or ""


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def workers() -> list[psutil.Process]:
    return workers_of(os.getpid())


def running() -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        pairs = [(parent, child) for parent in programs_of(os.getpid()) for child in parent.children()]
        return any(parent.name() == "bwrap" and child.name() != "bwrap" for parent, child in pairs)
    return False


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_its_result(name: str, runner: SandboxUnderTest) -> None:
    request, code, stdout, stderr = PROGRAMS[name]
    answer = runner.run(program(**request))
    result = answer.run_result
    assert result is not None
    assert (answer.status, answer.compile_result) == (Status.SUCCESS if code == 0 else Status.FAILED, None)
    assert result.status is (CommandStatus.TIME_LIMIT_EXCEEDED if code is None else CommandStatus.FINISHED)
    assert (result.return_code, result.stdout) == (code, stdout), result.stderr
    assert stderr in (result.stderr or "")
    assert ("1 s" in answer.message) == (code is None)
    assert 0 < (result.execution_time or 0) < 60


@within(lambda: LocalSandbox(ONE))
async def test_cpu_time_is_a_time_limit(sandbox: LocalSandbox) -> None:
    """Eight threads use eight seconds in one: the process's own limit comes before the wall's, given enough cores."""
    code = """
        import hashlib, threading
        for _ in range(8):
            threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 10**9)).start()
    """
    answer = await sandbox.run_code(program(code, run_timeout=1.0))
    assert answer.run_result.status is CommandStatus.TIME_LIMIT_EXCEEDED


def test_files_in_and_out(runner: SandboxUnderTest) -> None:
    code = """
        import os, helper
        from package.part import value
        os.makedirs("made/deep")
        open("made/deep/out.bin", "wb").write(bytes(range(256)) + open("data/in.bin", "rb").read())
        open("empty", "w").close()
        os.symlink("/etc/passwd", "link")
        os.symlink("made/deep/out.bin", "own")
        os.mkfifo("pipe")
        open("large", "wb").write(bytes(17 << 20))
        print(helper.name, value, flush=True)
        os.abort()
    """
    files = {"helper.py": b"name = 'h'", "package/part.py": b"value = 7", "data/in.bin": b"\0\xff"}
    wanted = ["made/deep/out.bin", "empty", "link", "own", "pipe", "made", "missing", "large", "/tmp/run/data/in.bin"]
    answer = runner.run(program(code, files={name: encoded(data) for name, data in files.items()}, fetch_files=wanted))
    assert answer.run_result is not None
    assert (answer.run_result.return_code, answer.run_result.stdout) == (134, "h 7\n")
    out = bytes(range(256)) + b"\0\xff"
    fetched = {name: base64.b64decode(data) for name, data in answer.files.items()}
    assert fetched == {"made/deep/out.bin": out, "own": out, "empty": b"", "/tmp/run/data/in.bin": b"\0\xff"}


def test_a_request_that_cannot_run_is_no_failed_program(runner: SandboxUnderTest) -> None:
    with pytest.raises(RequestRefused, match="refuses the request: .*cobol"):
        runner.run(program("print(1)", language="cobol"))
    assert output(runner.run(program("print(2)"))) == "2\n"


@in_event_loop
async def test_nothing_of_one_run_is_there_for_the_next(folder: Path) -> None:
    """The sandbox has another interpreter and another folder to show; either may be below /tmp."""
    (folder / "shown").write_text("text")
    look_then_write = f"""
        import os, pydantic, sys
        print(*map(os.listdir, ['/tmp', '/dev/shm', '.']), open({str(folder / "shown")!r}).read(), sys.prefix)
        for place in ['/tmp/left', '/dev/shm/left', 'left']:
            open(place, 'w')
    """

    settings = Settings(workers=1, python=sys.executable, read_only=(str(folder),))
    async with LocalSandbox(settings) as sandbox:
        first, second = [output(await sandbox.run_code(program(look_then_write))) for _ in range(2)]
    assert first == second
    assert second.endswith(f" [] ['program.py'] text {sys.prefix}\n")


@in_event_loop
async def test_a_cancelled_caller_leaves_nothing_running() -> None:
    sandbox = LocalSandbox(ONE)  # its worker is not there yet when the first is cancelled
    for started in (False, True):
        task = asyncio.create_task(sandbox.run_code(program(FOREVER)))
        await asyncio.sleep(0)
        if started:
            await until(running)
        await cancelled(task)
        # The one worker is free again, so the program is dead; a run cancelled while it waits takes no slot.
        first = asyncio.create_task(sandbox.run_code(program("import time; time.sleep(0.3); print(1)")))
        waiting = asyncio.create_task(sandbox.run_code(program(FOREVER)))
        await until(running)
        waiting.cancel()
        assert output(await first) == "1\n"
        await until(lambda: not running())
    await sandbox.close()


@within(lambda: LocalSandbox(ONE))
async def test_a_worker_that_dies_is_no_verdict_and_is_replaced(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.run_code(program(FOREVER)))
    await until(running)
    (worker,) = [worker for worker in workers() if worker.children()]
    family = worker.children(recursive=True)
    worker.kill()
    with pytest.raises(SandboxUnavailable, match=r"ended \(SIGKILL\)"):
        await task
    assert psutil.wait_procs(family, timeout=600)[1] == []
    assert output(await sandbox.run_code(program("print(1)"))) == "1\n"


@in_event_loop
async def test_a_worker_killed_while_bubblewrap_starts_leaves_nothing(folder: Path) -> None:
    """Here bubblewrap never gets as far as to bind its life to its parent's."""
    stuck = folder / "bwrap"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    async with LocalSandbox(Settings(workers=1, bwrap=str(stuck))) as sandbox:
        task = asyncio.create_task(sandbox.run_code(program("print(1)")))
        await until(lambda: programs_of(os.getpid()) != [])
        (bwrap,) = programs_of(os.getpid())
        bwrap.parent().kill()
        with pytest.raises(SandboxUnavailable, match="ended"):
            await task
        assert psutil.wait_procs([bwrap], timeout=600)[1] == []


@in_event_loop
async def test_closing_ends_what_runs_on_as_many_workers_as_allowed() -> None:
    sandbox = LocalSandbox(Settings(workers=2))
    others = set(workers())
    answers = await asyncio.gather(*(sandbox.run_code(program("print(1)")) for _ in range(5)))
    assert [output(answer) for answer in answers] == ["1\n"] * 5
    tasks = [asyncio.create_task(sandbox.run_code(program(FOREVER))) for _ in range(3)]
    own = set(workers()) - others
    assert len(own) == 2
    await until(lambda: all(worker.children() for worker in own))
    family = [child for worker in own for child in (worker, *worker.children(recursive=True))]
    await sandbox.close()
    assert not any(process.is_running() for process in family)
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(answer, SandboxUnavailable)
    if sandbox.cgroup is not None:
        assert list(sandbox.cgroup.glob(f"{sandbox._name}-*")) == []


@in_event_loop
async def test_closing_ends_a_worker_whose_pipe_a_forked_process_holds() -> None:
    sandbox = LocalSandbox(Settings(workers=1))
    await sandbox.start()
    read, write = os.pipe()
    if not (child := os.fork()):
        os.read(read, 1)
        os._exit(0)
    try:
        await asyncio.wait_for(sandbox.close(), 30)
    finally:
        os.write(write, b".")
        os.waitpid(child, 0)


# Without a namespace, processes of the same user in other sandboxes count too.
@within(lambda: LocalSandbox(Settings(workers=1, isolated=False, processes=4096)))
async def test_without_isolation_limits_hold_and_nothing_is_left(sandbox: LocalSandbox) -> None:
    code = """
        import os, sys
        print(open("a/b").read(), input(), os.path.exists("/proc/cmdline"))
        open("out", "w").write(os.getcwd())
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "1000"])
    """
    request = program(code, files={"a/b": encoded(b"x")}, stdin="y", fetch_files=["out"])
    answer = await sandbox.run_code(request)
    assert output(answer) == "x y True\n"
    folder = base64.b64decode(answer.files["out"]).decode()
    assert "spo-sandbox-" in folder
    assert not os.path.exists(folder)
    assert programs_of(os.getpid()) == []
    answer = await sandbox.run_code(program("bytearray(1 << 30)"))
    assert "MemoryError" in answer.run_result.stderr
    answer = await sandbox.run_code(program("sleep 1000", language="bash", run_timeout=0.5))
    assert answer.run_result.status is CommandStatus.TIME_LIMIT_EXCEEDED
