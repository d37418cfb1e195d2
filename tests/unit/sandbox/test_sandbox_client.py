"""SandboxClient: its connections and tokens, which answers it takes, when it asks again, and when it gives up."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

import sandbox_client
from common.config import SandboxConfig
from common.errors import UserError
from common.log import get_logger
from sandbox_client import TOKEN_VARIABLE, RequestRefused, RunCodeRequest, SandboxClient, SandboxUnavailable, Status
from sandbox_client.client import PROBE_INTERVAL
from tests.support.http_double import Double, Handler, hangs, serve
from tests.support.sandbox_double import QUICK, Reply, Time, alone, answers, client, outcome, result, run, says, sends
from tests.support.waiting import until

BUSY = says(b"full", status=503)
LOCAL = "http://127.0.0.1:1"


@asynccontextmanager
async def under_way(server: Double, sandbox: SandboxClient) -> AsyncIterator[None]:
    """A call whose request has arrived; it is cancelled at the end."""
    call = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="while True: pass")))
    await until(lambda: server.requests)
    yield
    call.cancel()
    await asyncio.wait([call])


@alone
async def test_requests_are_bounded_and_connections_reused() -> None:
    gate = threading.Event()

    def held(handler: Handler, body: Any) -> None:
        gate.wait()
        answers()(handler, body)

    with serve(held) as server:
        async with client(server, concurrency=4) as sandbox:
            calls = [asyncio.create_task(sandbox.run_code(QUICK)) for _ in range(50)]
            await until(lambda: server.open == 4)
            gate.set()
            await asyncio.gather(*calls)
            assert (len(server.requests), server.most_open, len(server.connections)) == (50, 4, 4)
        await until(lambda: not server.connected)  # closing the client closes its connections


@alone
async def test_an_answer_on_an_older_connection_closes_the_breaker() -> None:
    moment = Time()
    with serve(answers()) as server:
        async with client(server, moment) as sandbox:
            await sandbox.run_code(QUICK)
            sandbox._breaker.connection_failed("no route to host")
            moment.now += PROBE_INTERVAL
            await sandbox.run_code(QUICK)
            assert (sandbox._breaker.is_open, len(server.connections)) == (False, 1)


@alone
async def test_a_cancelled_call_frees_its_slot_and_waiting_counts() -> None:
    with serve(hangs, answers()) as server:
        async with client(server, concurrency=1, deadline=0.05) as sandbox:
            async with under_way(server, sandbox):
                with pytest.raises(SandboxUnavailable, match="in time"):
                    await sandbox.run_code(QUICK)
                assert len(server.requests) == 1
            await until(lambda: not server.connected)
            assert (await sandbox.run_code(RunCodeRequest(code=""))).status is Status.SUCCESS


@pytest.mark.parametrize(
    ("url", "token", "key"),
    [
        *((url, None, "url") for url in ("", "localhost:8080", "ftp://x", "http://[::1", "http://a:65536", "http://")),
        ("http://a..b", None, "url"),
        (LOCAL, "a\nb", "token"),
    ],
)
def test_an_impossible_address_or_token_is_refused(url: str, token: str | None, key: str) -> None:
    with pytest.raises(UserError, match=rf"sandbox\.{key}") as caught:
        SandboxClient(url, token=token)
    assert token is None or token not in str(caught.value)


def test_token_file_goes_before_key_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**values: Any) -> str | None:
        sandbox = sandbox_client.make_sandbox(SandboxConfig(url=LOCAL, **values))
        return sandbox._http.headers.get("authorization")  # type: ignore[attr-defined]

    file = tmp_path / "token"
    file.write_text("of the file\n")
    assert sent() is None
    monkeypatch.setenv(TOKEN_VARIABLE, "of the environment")
    assert sent() == "Bearer of the environment"
    assert sent(token="of the key") == "Bearer of the key"
    assert sent(token="of the key", token_file=str(file)) == "Bearer of the file"
    with pytest.raises(UserError, match=r"cannot read sandbox.token_file .*none: No such file"):
        sent(token_file=str(tmp_path / "none"))


@alone
async def test_a_script_s_call_sends_its_token_past_every_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, LOCAL)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-env")
    with serve(answers()) as server:
        answer = await asyncio.to_thread(sandbox_client.run_code, "print(89)", url=server.url, memory_mb=64)
    assert answer.run_result is not None
    assert answer.run_result.stdout == "89\n"
    assert server.requests[0]["memory_limit_MB"] == 64
    assert server.headers[0]["Authorization"] == "Bearer from-env"


def test_a_busy_server_is_asked_again_when_it_says() -> None:
    answer, server, _ = run(outcome(says(b"not complete after 60 s", status=408), answers()))
    assert (answer.status, len(server.requests)) == (Status.SUCCESS, 2)
    answer, server, moment = run(outcome(says(b"", status=429, Retry_After="17"), BUSY, answers()))
    assert answer.status is Status.SUCCESS
    assert (moment.sleeps[0], 0.5 <= moment.sleeps[1] <= 1.0) == (17, True)
    assert server.requests == [server.requests[0]] * 3
    error, server, moment = run(outcome(BUSY, attempts=10_000, deadline=60))
    assert isinstance(error, SandboxUnavailable)
    assert 40 < sum(moment.sleeps) <= 60.02


@alone
async def test_callers_of_a_dead_server_make_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(answers()) as server:
        pass
    moment, port = Time(), server.port
    async with client(server, moment, concurrency=8, attempts=1) as sandbox:
        sent: list[Any] = []
        stream = sandbox._http.stream
        monkeypatch.setattr(sandbox._http, "stream", lambda *a, **b: sent.append(a) or stream(*a, **b))

        async def crowd() -> list[Any]:
            return await asyncio.gather(*(sandbox.run_code(QUICK) for _ in range(1000)), return_exceptions=True)

        outcomes = await crowd()
        assert len(sent) == 8, "as many as were under way when the first one failed"
        for probes in range(1, 4):
            moment.now += PROBE_INTERVAL
            outcomes += await crowd()
            assert len(sent) == 8 + probes, "one a while"
        last = "no result in 1 attempts; last: ConnectError: All connection attempts failed"
        assert {(type(error), str(error)) for error in outcomes} == {
            (sandbox_client.SandboxUnreachable, f"sandbox 127.0.0.1:{port}: {last}")
        }
        moment.now += PROBE_INTERVAL
        with serve(hangs, answers(), port=port) as back:
            async with under_way(back, sandbox):
                # The first program after an outage holds up no other.
                assert (await sandbox.run_code(QUICK)).status is Status.SUCCESS
            await sandbox.close()


def ready(*replies: Reply, seconds: float = 600.0) -> tuple[int, list[Any]]:
    """Requests made until a server that plays these replies was seen to be ready, and the log."""

    async def test() -> int:
        with serve(*replies) as server:
            async with SandboxClient(server.url, attempts=1) as sandbox:
                await sandbox_client.wait_until_ready(sandbox, seconds, get_logger())
            return len(server.requests)

    with capture_logs() as lines:
        return asyncio.run(test()), lines


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (hangs, r"gives no result within sandbox.wait = 0.5 s; start it \(spo-sandbox\), or set sandbox.url"),
        (says(b"no token", status=401), "status 401: .*no token.*; sandbox.token or sandbox.url must be wrong"),
    ],
)
def test_a_sandbox_that_cannot_be_used_is_one_line(reply: Reply, line: str) -> None:
    with pytest.raises(UserError, match=line):
        ready(reply, seconds=0.5 if reply is hangs else 600)


def test_a_sandbox_is_ready_after_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_client.PAUSE", 0.01)
    assert ready(answers(stdout="42\n")) == (1, [])
    requests, log = ready(BUSY, seconds=0.5)
    assert requests >= 1
    end = "the sandbox gave no result within sandbox.wait; continuing"
    assert [line["event"] for line in log] == ["waiting for the sandbox", end]
    assert "status 503: full" in log[1]["reason"]


TRUNCATED = json.dumps(result(stdout="x" * 1000)).encode()[:600]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HALF = OK + b"Content-Length: 1200\r\n\r\n" + TRUNCATED


def test_request_and_answer_are_sandboxfusions() -> None:
    sent = {"code": "print(89)", "language": "cpp", "stdin": "1 2", "run_timeout": 3.0, "memory_limit_MB": 512}
    sent |= {"files": {"b.txt": "aGk="}, "fetch_files": ["a.txt"]}
    reply = says(json.dumps(result(files={"a.txt": "aGk="})).encode(), Content_Type="text/plain")
    answer, server, _ = run(outcome(reply, request=RunCodeRequest(**sent)))
    assert server.requests == [{**sent, "compile_timeout": 10.0}]
    assert server.paths == ["/run_code"]
    assert server.headers[0]["Content-Type"] == "application/json"
    ended = {"status": "Finished", "execution_time": 0.0123, "return_code": 0, "stdout": "89\n", "stderr": ""}
    expected = {"status": "Success", "message": "", "compile_result": None, "run_result": ended}
    assert answer.model_dump() == {**expected, "executor_pod_name": None, "files": {"a.txt": "aGk="}}


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "Failed", "return_code": -9},
        {"status": "Failed", "run_result": None, "compile_result": {"status": "Finished", "return_code": 1}},
        {"status": "Success", "stdout": "\u0000\x1b[2J\u2028\U0001f600" * 1000},
    ],
)
def test_a_result_is_one_whatever_it_says(fields: dict[str, Any]) -> None:
    answer, server, _ = run(outcome(answers(**fields)))
    assert (answer.status, len(server.requests)) == (fields["status"], 1)
    assert answer.run_result is None or answer.run_result.stdout == fields.get("stdout", "89\n")


def resets(handler: Handler, body: Any) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    os.close(handler.connection.detach())


MISBEHAVIOUR: dict[str, Reply] = {
    "500": says(b"Internal Server Error", status=500),
    "malformed JSON": says(b'{"status": "Success", "message": '),
    "deep JSON": says(b"[" * 100_000),
    "unknown status": answers(status="Pending"),
    "result missing": answers(run_result=None),
    "sandbox error": answers(status="SandboxError", message="no pod left\n" * 1000),
    "reset": resets,
    "not HTTP": sends(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "cut off in the middle": sends(HALF),
    "cut off in a chunk": sends(CHUNKED + b"4b0\r\n" + TRUNCATED),
    "compressed unasked": says(b"\x1f\x8b\x08\x00", Content_Encoding="gzip"),
    "endless head": sends(OK + b"X: " + b"x" * 1_000_000),
    "silence": hangs,
}


@pytest.mark.integration  # it waits
@pytest.mark.parametrize("fault", MISBEHAVIOUR)
def test_a_bad_answer_is_asked_again_and_only_bad_ones_are_none(fault: str) -> None:
    timeout = 0.5 if "silence" in fault else 30.0
    answer, server, moment = run(outcome(MISBEHAVIOUR[fault], answers(), timeout=timeout))
    assert not isinstance(answer, SandboxUnavailable), answer
    assert (answer.status, len(server.requests), len(moment.sleeps)) == (Status.SUCCESS, 2, 1)
    error, server, _ = run(outcome(MISBEHAVIOUR[fault], attempts=2, timeout=timeout))
    assert type(error) is SandboxUnavailable  # a server that answers anything can be reached
    assert len(server.requests) == 2
    assert "no result in 2 attempts" in str(error)
    assert (len(str(error)) < 800, str(error).isprintable(), error.__cause__) == (True, True, None)


REFUSALS = {
    str(status): says(b'{"detail": "language klingon\n is not known"}' + b"x" * 100_000, status=status, Location="/")
    for status in (401, 307)
} | {"423": sends(b"HTTP/1.1 423 x\r\nContent-Length: 100\r\n\r\nlanguage klingon")}  # cut off in the middle


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_is_not_asked_again(status: str) -> None:
    error, server, moment = run(outcome(REFUSALS[status]))
    assert isinstance(error, RequestRefused)
    assert f"status {status}" in str(error)
    assert status == "423" or "language klingon" in str(error)
    assert len(str(error)) < 800
    assert (len(server.requests), moment.sleeps) == (1, [])


@pytest.mark.integration  # it reads megabytes
@pytest.mark.parametrize("declared", [False, True])
def test_an_answer_without_end_is_cut_off(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    flooded = 0

    def floods(handler: Handler, body: Any) -> None:
        nonlocal flooded
        handler.wfile.write(CHUNKED)
        while True:
            handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            flooded += 65536

    monkeypatch.setattr("sandbox_client.client.MAX_ANSWER", limit)
    error, server, _ = run(outcome(answers(stdout="x" * 40 * limit) if declared else floods))
    assert isinstance(error, SandboxUnavailable)
    assert f"longer than {limit} bytes" in str(error)
    assert len(server.requests) == 1
    assert flooded < 16 * limit  # what sockets hold comes on top of what is read


@pytest.mark.integration  # it starts many servers
@settings(max_examples=25)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_an_unavailable_sandbox(content: bytes, head: bool) -> None:
    error, _, _ = run(outcome(says(content) if head else sends(content), attempts=1))
    assert isinstance(error, SandboxUnavailable)
