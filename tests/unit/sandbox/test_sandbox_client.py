"""SandboxClient against a server that keeps to SandboxFusion's format, and against the same server gone wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sandbox_client
from common.config import SandboxConfig
from common.errors import UserError
from sandbox_client import CommandStatus, RunCodeRequest, SandboxClient, SandboxUnavailable, Status, make_sandbox
from tests.sandbox_double import Reply, SandboxDouble, answers, floods, hangs, resets, result, says, sends

QUICK = RunCodeRequest(code="print(89)", compile_timeout=0.01, run_timeout=0.01)


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def client(server: SandboxDouble, time: Time | None = None, **options: Any) -> SandboxClient:
    time = time or Time()
    return SandboxClient(server.url, clock=time.clock, sleep=time.sleep, **options)


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Run a test; a task that is left behind fails it."""

    async def alone() -> Any:
        value = await test
        for _ in range(10):  # generators that were not read to their end are closed by the loop
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return value

    return asyncio.run(alone())


async def outcome(*replies: Reply, request: RunCodeRequest = QUICK, **options: Any) -> tuple[Any, SandboxDouble, Time]:
    """(response or exception, server, time) of one call."""
    moment = Time()
    async with SandboxDouble(*replies) as server, client(server, moment, **options) as sandbox:
        try:
            return await sandbox.run_code(request), server, moment
        except SandboxUnavailable as error:
            return error, server, moment


def test_request_and_answer_are_sandboxfusions() -> None:
    async def test() -> None:
        async with SandboxDouble(answers(files={"a.txt": "aGk="})) as server, client(server, memory_mb=512) as sandbox:
            answer = await sandbox.run(
                "print(89)", "cpp", stdin="1 2", run_timeout=3, files={"b.txt": "aGk="}, fetch_files=["a.txt"]
            )
        assert server.requests == [
            {
                "code": "print(89)",
                "language": "cpp",
                "stdin": "1 2",
                "compile_timeout": 10.0,
                "run_timeout": 3.0,
                "memory_limit_MB": 512,
                "files": {"b.txt": "aGk="},
                "fetch_files": ["a.txt"],
            }
        ]
        assert answer.status is Status.SUCCESS
        assert answer.run_result is not None
        assert answer.run_result.status is CommandStatus.FINISHED
        assert (answer.run_result.stdout, answer.run_result.return_code) == ("89\n", 0)
        assert answer.run_result.execution_time == 0.0123
        assert (answer.executor_pod_name, answer.files) == (None, {"a.txt": "aGk="})

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "Failed", "return_code": 1},
        {"status": "Failed", "return_code": -9},
        {"status": "Failed", "run_status": "TimeLimitExceeded", "return_code": None, "stdout": None},
        {"status": "Failed", "run_result": None, "compile_result": {"status": "Finished", "return_code": 1}},
        {"status": "Success", "stdout": "\u0000\x1b[2J\u2028\U0001f600" * 1000},
    ],
)
def test_a_failing_program_is_a_result(fields: dict[str, Any]) -> None:
    answer, server, _ = run(outcome(answers(**fields)))
    assert answer.status == fields["status"]
    assert len(server.requests) == 1


def test_backoff_doubles_with_jitter_until_the_server_answers() -> None:
    busy = says(b"upstream timed out", status=504, kind="text/plain")
    answer, server, moment = run(outcome(busy, busy, busy, busy, answers()))
    assert answer.status is Status.SUCCESS
    assert len(server.requests) == 5
    for slept, most in zip(moment.sleeps, (0.5, 1.0, 2.0, 4.0), strict=True):
        assert most / 2 <= slept <= most
    assert all(request == server.requests[0] for request in server.requests)


async def stalls(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half an answer, and then nothing."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1200\r\n\r\n" + TRUNCATED[:600])
    await hangs(double, reader, writer)


TRUNCATED = json.dumps(result(stdout="x" * 1000)).encode()
MISBEHAVIOUR: dict[str, Reply] = {
    "500": says(b"Internal Server Error", status=500),
    "502": says(b"<html>bad gateway</html>", status=502, kind="text/html"),
    "503": says(b"", status=503),
    "504": says(b"\xff\xfe\x00", status=504),
    "html instead of a result": says(b"<html>please log in</html>", kind="text/html"),
    "malformed JSON": says(b'{"status": "Success", "message": '),
    "no JSON object": says(b"[]"),
    "deep JSON": says(b"[" * 100_000),
    "not UTF-8": says(b'{"status": "\xff"}'),
    "empty": says(b""),
    "unknown status": answers(status="Pending"),
    "unknown status of the run": answers(run_status="Exploded"),
    "return code that is text": answers(return_code="zero"),
    "200,000 wrong files": answers(files={str(i): None for i in range(200_000)}),
    "result missing": answers(run_result=None),
    "failed without a reason": answers(status="Failed", run_result=None),
    "sandbox error": answers(status="SandboxError", message="no pod left\n" * 1000),
    "reset": resets,
    "closed": sends(b""),
    "not HTTP": sends(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "cut off in the middle": sends(b"HTTP/1.1 200 OK\r\nContent-Length: 1200\r\n\r\n" + TRUNCATED[:600]),
    "cut off in a chunk": sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4b0\r\n" + TRUNCATED[:600]),
    "cut off in the head": sends(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "bad chunk size": sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"),
    "contradicting lengths": sends(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}"),
    "compressed unasked": says(b"\x1f\x8b\x08\x00", Content_Encoding="gzip"),
    "endless head": sends(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000),
    "silence": hangs,
    "silence in the middle": stalls,
}


@pytest.mark.parametrize("fault", MISBEHAVIOUR)
def test_one_bad_answer_is_asked_again(fault: str) -> None:
    answer, server, moment = run(outcome(MISBEHAVIOUR[fault], answers(), timeout=0.1 if "silence" in fault else 30.0))
    assert not isinstance(answer, SandboxUnavailable), answer
    assert answer.status is Status.SUCCESS
    assert len(server.requests) == 2
    assert len(moment.sleeps) == 1


@pytest.mark.parametrize("fault", MISBEHAVIOUR)
def test_bad_answers_alone_are_an_unavailable_sandbox(fault: str) -> None:
    error, server, _ = run(outcome(MISBEHAVIOUR[fault], attempts=2, timeout=0.02 if "silence" in fault else 30.0))
    assert isinstance(error, SandboxUnavailable)
    assert len(server.requests) == 2
    text = str(error)
    assert "no result in 2 attempts" in text
    assert len(text) < 800
    assert text.isprintable()
    assert error.__cause__ is None


def test_the_content_type_does_not_matter_if_the_result_is_one() -> None:
    body = json.dumps(result()).encode()
    answer, server, _ = run(outcome(says(body, kind="text/plain")))
    assert (answer.status, len(server.requests)) == (Status.SUCCESS, 1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 307, 201])
def test_a_refusal_is_not_asked_again(status: int) -> None:
    refusal = says(b'{"detail": "language klingon\n is not known"}' + b"x" * 100_000, status=status, Location="/")
    error, server, moment = run(outcome(refusal))
    assert isinstance(error, SandboxUnavailable)
    assert f"status {status}" in str(error)
    assert "language klingon" in str(error)
    assert len(str(error)) < 800
    assert (len(server.requests), moment.sleeps) == (1, [])


def test_a_refusal_cut_off_in_the_middle_is_still_one() -> None:
    cut = sends(b"HTTP/1.1 422 x\r\nContent-Length: 100\r\n\r\n{")
    error, server, _ = run(outcome(cut))
    assert "status 422" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_honoured(status: int) -> None:
    answer, _, moment = run(outcome(says(b"later", status=status, Retry_After="17"), answers()))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps == [17.0]


def test_retry_after_as_a_date_is_honoured() -> None:
    later = says(b"later", status=429, Retry_After=formatdate(time.time() + 60, usegmt=True))
    _, _, moment = run(outcome(later, answers()))
    assert 50 < moment.sleeps[0] <= 60


@pytest.mark.parametrize("value", ["soon", "-5", "", "1e3", "9" * 5000, "\xff", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_says_nothing_leaves_the_backoff(value: str) -> None:
    head = f"HTTP/1.1 429 x\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    answer, _, moment = run(outcome(sends(head), answers()))
    assert answer.status is Status.SUCCESS
    assert moment.sleeps[0] <= 0.5


def test_nobody_waits_for_a_server_that_wants_more_time_than_there_is() -> None:
    error, server, moment = run(outcome(says(b"later", status=429, Retry_After="3600"), deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert (len(server.requests), moment.sleeps) == (1, [])


def test_the_whole_call_ends_by_its_deadline() -> None:
    error, server, moment = run(outcome(says(b"", status=504), attempts=10_000, deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert 40 < sum(moment.sleeps) <= 60.02
    assert len(server.requests) == len(moment.sleeps) + 1


def test_waiting_for_a_slot_counts_for_the_deadline() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs) as server, client(server, concurrency=1, deadline=0.05) as sandbox:
            first = asyncio.create_task(sandbox.run(code="1"))
            while not server.requests:
                await asyncio.sleep(0)
            with pytest.raises(SandboxUnavailable, match="in time"):
                await sandbox.run_code(QUICK)
            assert len(server.requests) == 1
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first

    run(test())


def test_an_attempt_may_take_the_programs_own_time_and_the_timeout() -> None:
    async def slow(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await answers()(double, reader, writer)

    patient = RunCodeRequest(code="1", compile_timeout=0.001, run_timeout=30)
    answer, _, moment = run(outcome(slow, request=patient, timeout=0.01))
    assert (answer.status, moment.sleeps) == (Status.SUCCESS, [])
    error, _, _ = run(outcome(slow, request=QUICK, timeout=0.01, attempts=1))
    assert "no answer in time" in str(error)


@pytest.mark.parametrize("declared", [False, True])
def test_an_answer_without_end_is_cut_off(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.client.MAX_ANSWER", 1 << 20)
    limit = 1 << 20
    endless = says(json.dumps(result(stdout="x" * 40 * limit)).encode()) if declared else floods
    error, server, _ = run(outcome(endless))
    assert isinstance(error, SandboxUnavailable)
    assert f"longer than {limit} bytes" in str(error)
    assert len(server.requests) == 1
    assert server.flooded < 16 * limit  # what sockets hold comes on top of what is read


def test_a_long_answer_within_the_limit_is_read() -> None:
    answer, _, _ = run(outcome(answers(stdout="é" * (2 << 20))))
    assert len(answer.run_result.stdout) == 2 << 20


def test_requests_under_way_are_bounded_and_connections_reused() -> None:
    async def test() -> None:
        full = asyncio.Event()

        async def gated(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if double.open == 4:
                full.set()
            await full.wait()
            await answers()(double, reader, writer)

        async with SandboxDouble(gated) as server:
            async with client(server, concurrency=4) as sandbox:
                await asyncio.gather(*(sandbox.run_code(QUICK) for _ in range(50)))
                assert len(server.requests) == 50
                assert server.most_open == 4
                assert server.accepted == 4
                for _ in range(20):
                    await sandbox.run_code(QUICK)
                assert server.accepted == 4
            await server.all_gone()  # closing the client closes its connections
            assert server.connected == 0

    run(test())


def test_waiting_for_a_slot_is_not_an_attempt() -> None:
    async def test() -> None:
        free = asyncio.Event()

        async def gated(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await free.wait()
            await answers()(double, reader, writer)

        moment = Time()
        async with SandboxDouble(gated) as server, client(server, moment, concurrency=1, timeout=0.01) as sandbox:
            first = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="1")))
            second = asyncio.create_task(sandbox.run_code(QUICK))
            await asyncio.wait([second], timeout=0.1)  # longer than its attempt may take
            free.set()
            await asyncio.gather(first, second)
            assert (len(server.requests), moment.sleeps) == (2, [])

    run(test())


def test_backing_off_holds_no_slot() -> None:
    async def test() -> None:
        asleep = asyncio.Event()

        async def sleep(seconds: float) -> None:
            asleep.set()
            await asyncio.Event().wait()

        server = SandboxDouble(says(b"", status=503), answers())
        async with server, SandboxClient(server.url, concurrency=1, sleep=sleep) as sandbox:
            waiting = asyncio.create_task(sandbox.run_code(QUICK))
            await asleep.wait()
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    run(test())


def test_a_cancelled_call_gives_its_slot_and_connection_back() -> None:
    async def test() -> None:
        async with SandboxDouble(hangs, answers()) as server, client(server, concurrency=1) as sandbox:
            call = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="1")))
            while not server.requests:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.all_gone()
            assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS

    run(test())


def test_a_server_that_closes_idle_connections_is_connected_to_again() -> None:
    async def test() -> None:
        async def once(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answers()(double, reader, writer)
            writer.close()

        async with SandboxDouble(once) as server, client(server) as sandbox:
            for _ in range(5):
                assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
                await server.all_gone()

    run(test())


def test_a_dead_server_that_comes_back_answers() -> None:
    async def test() -> None:
        async with SandboxDouble() as first:
            port = first.port
        server = SandboxDouble(port=port)

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                await server.start()

        slept: list[float] = []
        async with SandboxClient(first.url, sleep=sleep) as sandbox:
            answer = await sandbox.run_code(QUICK)
        assert answer.status is Status.SUCCESS
        assert (len(slept), len(server.requests)) == (3, 1)
        await server.__aexit__(None, None, None)

    run(test())


def test_a_dead_server_is_an_unavailable_sandbox() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            pass
        async with client(server) as sandbox:
            with pytest.raises(SandboxUnavailable, match=r"127\.0\.0\.1:\d+: no result in 5 attempts"):
                await sandbox.run_code(QUICK)

    run(test())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_whatever_comes_is_a_result_or_an_unavailable_sandbox(content: bytes, head: bool) -> None:
    error, _, _ = run(outcome(says(content) if head else sends(content), attempts=1))
    assert isinstance(error, SandboxUnavailable)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_result_with_anything_in_a_field_is_one_or_none(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(["status", "message", "compile_result", "run_result", "files", "run_status"]))
    junk = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.just({"a": {}})
    answer, _, _ = run(outcome(answers(**{field: data.draw(junk)}), attempts=1))
    assert isinstance(answer, SandboxUnavailable) or isinstance(answer.status, Status)


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://x", "http://[::1", "http://a:65536", "http://a..b", "http://"]
)
def test_an_address_that_cannot_be_one_is_named(url: str) -> None:
    with pytest.raises(UserError, match=r"sandbox\.url = .* must be of the form"):
        SandboxClient(url)


@pytest.mark.parametrize("token", ["a\nb", "schlüssel"])
def test_a_token_that_no_header_carries_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UserError, match=r"sandbox\.token") as caught:
        SandboxClient("http://127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize("path", ["", "/", "/run_code", "/run_code/"])
def test_the_url_may_name_the_call(path: str) -> None:
    async def test() -> None:
        async with SandboxDouble() as server, SandboxClient(server.url + path) as sandbox:
            await sandbox.run_code(QUICK)

    run(test())


def test_messages_show_no_password() -> None:
    async def test() -> None:
        async with SandboxDouble(says(b"", status=404)) as server:
            async with SandboxClient(server.url.replace("//", "//user:geheim@")) as sandbox:
                with pytest.raises(SandboxUnavailable) as caught:
                    await sandbox.run_code(QUICK)
            assert "geheim" not in str(caught.value)

    run(test())


def test_the_configured_server_gets_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            for given in (None, "from-file"):
                sandbox = make_sandbox(SandboxConfig(url=server.url, token=given))
                await sandbox.run_code(QUICK)
                await sandbox.close()
        assert [headers["authorization"] for headers in server.headers] == ["Bearer from-env", "Bearer from-file"]

    monkeypatch.setenv("SPO_SANDBOX_TOKEN", "from-env")
    run(test())


def test_no_proxy_of_the_environment_sees_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    answer, _, _ = run(outcome(answers(), attempts=1))
    assert answer.status is Status.SUCCESS


def test_a_script_runs_code_in_one_line() -> None:
    async def test() -> None:
        async with SandboxDouble() as server:
            answer = await asyncio.to_thread(sandbox_client.run_code, "print(89)", url=server.url, memory_mb=64)
            assert answer.run_result is not None
            assert answer.run_result.stdout == "89\n"
            assert server.requests[0]["memory_limit_MB"] == 64

    run(test())
