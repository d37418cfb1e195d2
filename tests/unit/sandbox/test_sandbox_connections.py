"""SandboxClient's connections: how many, to whom, and who sees what."""

from __future__ import annotations

import asyncio

import pytest

import sandbox_client
from common.config import SandboxConfig
from common.errors import UserError
from sandbox_client import RunCodeRequest, SandboxClient, SandboxUnavailable, Status, make_sandbox
from tests.support.sandbox_calls import QUICK, Time, client, outcome, run
from tests.support.sandbox_double import SandboxDouble, answers, hangs, says


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


@pytest.mark.integration
def test_waiting_for_a_slot_is_not_an_attempt() -> None:
    async def test() -> None:
        free = asyncio.Event()

        async def gated(double: SandboxDouble, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await free.wait()
            await answers()(double, reader, writer)

        moment = Time()
        async with SandboxDouble(gated) as server, client(server, moment, concurrency=1, timeout=1.0) as sandbox:
            first = asyncio.create_task(sandbox.run_code(RunCodeRequest(code="1")))
            second = asyncio.create_task(sandbox.run_code(QUICK))
            await asyncio.wait([second], timeout=1.2)  # longer than its attempt may take
            free.set()
            await asyncio.gather(first, second)
            assert (len(server.requests), moment.sleeps) == (2, [])

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
