"""SandboxClient takes SandboxFusion's answers, asks again after bad ones, and believes a refusal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_client import RequestRefused, RunCodeRequest, SandboxUnavailable, Status
from tests.support.sandbox_double import Reply, SandboxDouble, answers, hangs, outcome, resets, result, run, says, sends

TRUNCATED = json.dumps(result(stdout="x" * 1000)).encode()[:600]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HALF = OK + b"Content-Length: 1200\r\n\r\n" + TRUNCATED


def test_request_and_answer_are_sandboxfusions() -> None:
    sent = {"code": "print(89)", "language": "cpp", "stdin": "1 2", "run_timeout": 3.0, "memory_limit_MB": 512}
    sent |= {"files": {"b.txt": "aGk="}, "fetch_files": ["a.txt"]}
    reply = says(json.dumps(result(files={"a.txt": "aGk="})).encode(), kind="text/plain")  # the type does not matter
    answer, server, _ = run(outcome(reply, request=RunCodeRequest(**sent)))
    assert server.requests == [{**sent, "compile_timeout": 10.0}]
    assert server.headers[0]["content-type"] == "application/json"
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


@pytest.mark.parametrize("declared", [False, True])
def test_an_answer_without_end_is_cut_off(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    flooded = 0

    async def floods(_: SandboxDouble, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal flooded
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            flooded += 65536

    monkeypatch.setattr("sandbox_client.client.MAX_ANSWER", limit)
    error, server, _ = run(outcome(answers(stdout="x" * 40 * limit) if declared else floods))
    assert isinstance(error, SandboxUnavailable)
    assert f"longer than {limit} bytes" in str(error)
    assert len(server.requests) == 1
    assert flooded < 16 * limit  # what sockets hold comes on top of what is read


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_an_unavailable_sandbox(content: bytes, head: bool) -> None:
    error, _, _ = run(outcome(says(content) if head else sends(content), attempts=1))
    assert isinstance(error, SandboxUnavailable)
