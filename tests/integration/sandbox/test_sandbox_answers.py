"""What SandboxClient makes of answers: by SandboxFusion's format, and by a server gone wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_client import CommandStatus, RequestRefused, RunCodeRequest, SandboxUnavailable, Status
from tests.support.sandbox_calls import client, outcome, run
from tests.support.sandbox_double import Reply, SandboxDouble, answers, floods, hangs, resets, result, says, sends


def test_request_and_answer_are_sandboxfusions() -> None:
    async def test() -> None:
        async with SandboxDouble(answers(files={"a.txt": "aGk="})) as server, client(server) as sandbox:
            request = RunCodeRequest(
                code="print(89)",
                language="cpp",
                stdin="1 2",
                run_timeout=3,
                memory_limit_MB=512,
                files={"b.txt": "aGk="},
                fetch_files=["a.txt"],
            )
            answer = await sandbox.run_code(request)
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
    answer, server, moment = run(outcome(MISBEHAVIOUR[fault], answers(), timeout=1.0 if "silence" in fault else 30.0))
    assert not isinstance(answer, SandboxUnavailable), answer
    assert answer.status is Status.SUCCESS
    assert len(server.requests) == 2
    assert len(moment.sleeps) == 1


@pytest.mark.parametrize("fault", MISBEHAVIOUR)
def test_bad_answers_alone_are_an_unavailable_sandbox(fault: str) -> None:
    error, server, _ = run(outcome(MISBEHAVIOUR[fault], attempts=2, timeout=1.0 if "silence" in fault else 30.0))
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
    assert isinstance(error, RequestRefused)
    assert f"status {status}" in str(error)
    assert "language klingon" in str(error)
    assert len(str(error)) < 800
    assert (len(server.requests), moment.sleeps) == (1, [])


def test_a_refusal_cut_off_in_the_middle_is_still_one() -> None:
    cut = sends(b"HTTP/1.1 422 x\r\nContent-Length: 100\r\n\r\n{")
    error, server, _ = run(outcome(cut))
    assert "status 422" in str(error)
    assert len(server.requests) == 1


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
