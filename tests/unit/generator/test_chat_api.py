"""The client of chat endpoints against a server that misbehaves in every way a server can, and the judge."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import UserError
from generator.agents.containers.engine import ContainerEngine
from generator.chat_api import ChatApi, ChatUnavailable, _certificates
from generator.rewards import Outcome
from generator.rewards.judge import Judge, NoVerdict
from tests.support.event_loop import used
from tests.support.http_double import Double, Handler, endless, fails, hangs, raw, says, serve

ASKED = [{"role": "user", "content": "2+2?"}]
KEY = "sk-very-secret"


def ask(double: Double, n: int = 1, **limits: Any) -> list[str]:
    async def at_once(api: ChatApi) -> list[str]:
        return await asyncio.gather(*(api.complete(ASKED, temperature=0.5, max_tokens=7) for _ in range(n)))

    return used(lambda: ChatApi(f"{double.url}/v1/", "tiny", **({"backoff": 0.0, "attempts": 3} | limits)), at_once)


def cut(handler: Handler, body: Any) -> None:
    raw(handler, b'{"choices": [{"mess', promised=5000)
    handler.close_connection = True


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)


def test_it_sends_what_openai_compatible_servers_read() -> None:
    with serve(says("4")) as double:
        assert ask(double, api_key_env="SOME_KEY") == ["4"]
    assert double.requests == [{"model": "tiny", "messages": ASKED, "temperature": 0.5, "max_tokens": 7}]
    assert double.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(("host", "proxy"), [("localhost", "http_proxy"), ("127.0.0.2", "ALL_PROXY")])
def test_a_server_on_this_machine_is_asked_past_every_proxy(host: str, proxy: str, monkeypatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(proxy, "socks5://127.0.0.1:1" if proxy.isupper() else "http://127.0.0.1:1")
    with serve(says("4"), host=host) as double:
        assert ask(double, attempts=1) == ["4"]


TROUBLES = {
    "too many": fails(429),
    "server error": fails(500),
    "cut": cut,
    "endless": endless,
    "no JSON": lambda handler, body: raw(handler, b"hello"),
    "deep": lambda handler, body: raw(handler, b"[" * 100_000),
    "blank": says(" \n"),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble_is_tried_again_until_it_passes_or_stays(trouble: Callable[[Handler, Any], None]) -> None:
    with serve(trouble, trouble, says("4")) as double:
        assert ask(double) == ["4"]
    assert len(double.requests) == 3
    with serve(trouble) as double, pytest.raises(ChatUnavailable, match="no result in 3 attempts; last: ") as caught:
        ask(double)
    assert len(double.requests) == 3
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("status", [401, 302, 501])
def test_a_refusal_is_not_repeated(status: int) -> None:
    with serve(fails(status, f"wrong\nkey {KEY}")) as double, pytest.raises(ChatUnavailable) as caught:
        ask(double, api_key_env="SOME_KEY")
    assert len(double.requests) == 1
    assert str(caught.value) == f"{double.url}/v1/chat/completions: HTTP {status}: wrong key ***"


def test_silence_is_given_up() -> None:
    with serve(hangs) as double, pytest.raises(ChatUnavailable, match="no answer within 0.05 s"):
        ask(double, timeout=0.05, attempts=2)


def test_connections_are_used_again_and_bounded() -> None:
    together = threading.Barrier(3, timeout=600)

    def waits_for_two_more(handler: Handler, body: Any) -> None:
        together.wait()
        says("4")(handler, body)

    with serve(waits_for_two_more) as double:
        assert ask(double, n=12, concurrency=3) == ["4"] * 12
        assert double.most_open == 3
        assert len(double.connections) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url = '127.0.0.1:8000' must start with http://"),
        ({"base_url": "http://:8000/v1"}, "base_url = 'http://:8000/v1' must .* http://host:port/v1"),
        ({"base_url": "http://a:b/v1"}, "base_url = 'http://a:b/v1' must .* http://host:port/v1"),
        ({"base_url": "http://a:99999/v1"}, "base_url = 'http://a:99999/v1' must .* http://host:port/v1"),
        ({"base_url": "http://a", "attempts": 0}, "attempts = 0"),
        ({"base_url": "http://a", "concurrency": 0}, "concurrency = 0"),
        ({"base_url": "http://a", "timeout": 0}, "timeout = 0"),
        ({"base_url": "http://a", "timeout": float("nan")}, "timeout = nan"),
        ({"base_url": "http://a", "api_key_env": "NO_SUCH_KEY"}, "api_key_env = 'NO_SUCH_KEY': no such environment"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ChatApi(model="tiny", **options)


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r", f"{KEY}\x01", "sk-\tx", "sk-é"])
def test_a_key_that_no_header_carries_is_named_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(UserError, match="api_key_env = 'SOME_KEY': its value has characters") as caught:
        ChatApi("http://127.0.0.1:1", "tiny", api_key_env="SOME_KEY")
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("ALL_PROXY", "socks://127.0.0.1:1", "'https://a' is behind the environment's proxy: Unknown scheme for proxy"),
        ("HTTPS_PROXY", "http://[::1", "'https://a' is behind the environment's proxy: Invalid port"),
        ("SSL_CERT_FILE", "/no/such/file", "certificates of SSL_CERT_FILE = '/no/such/file' cannot be read: No such"),
        ("SSL_CERT_FILE", __file__, "certificates of SSL_CERT_FILE = '.*' cannot be read: "),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(name: str, value: str, named: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    _certificates.cache_clear()
    try:
        with pytest.raises(UserError, match=named):
            ChatApi("https://a", "tiny")
        for address in ("http://127.0.0.1:1", "unix:/a"):  # reached without proxy and certificates
            ChatApi(address, "tiny")
        ContainerEngine("unix:///a")
    finally:
        _certificates.cache_clear()


def test_an_endpoint_that_refuses_connections_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        with pytest.raises(ChatUnavailable, match="ConnectError"):
            ask(Double([], url=f"http://127.0.0.1:{taken.getsockname()[1]}"), attempts=2)


SOLVED = Outcome("Four.", response="Let me see. Four.", answer="4", row={"level": "easy"}, prompt="What is 2+2?")


def judge(double: Double, outcome: Outcome = SOLVED, **options: Any) -> float:
    options = {"backoff": 0.0, "attempts": 2} | options
    return used(lambda: Judge(f"{double.url}/v1", "tiny", **options), lambda made: made.score(outcome))


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([says("Score: 7")], 0.7),
        ([says("At first Score: 2, but then\nScore: 7.5")], 0.75),
        ([says("Hard to say."), says("Score: 11"), says("Score: 4")], 0.4),
        ([fails(503), says("Score: 5")], 0.5),
    ],
)
def test_the_last_number_counts_on_its_scale(replies: list[Any], expected: float) -> None:
    with serve(*replies) as double:
        assert judge(double) == pytest.approx(expected)
    assert len(double.requests) == len(replies)
    # A reply without a number is asked for again, at another temperature.
    again = 0.0 if len(replies) == 2 else 1.0
    assert [request["temperature"] for request in double.requests] == [0.0] + [again] * (len(replies) - 1)


def test_question_reference_and_answer_are_shown() -> None:
    with serve(says("Score: 1")) as double:
        judge(double, system="You are strict.", parameters={"max_tokens": 5})
    (request,) = double.requests
    system, asked = request["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert all(f">\n{text}\n<" in asked["content"] for text in ("What is 2+2?", "4", "Four."))
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0.0, 5)


def test_a_template_of_ones_own() -> None:
    prompt: list[dict[str, Any]] = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None}]
    outcome = Outcome("x" * 50 + "{text}", response="r", answer="4", row={"level": "easy"}, prompt=prompt)
    options = {"template": "{row[level]}|{prompt}|{text}|{response}|{{}}", "pattern": r"grade (-?\d)"}
    with serve(says("grade -1")) as double:
        assert judge(double, outcome, scale=(-2, 2), longest=8, **options) == 0.25
    asked = "easy|user: 2+2?\n\nassistant: |xx{text}|r|{}"
    assert double.requests[0]["messages"] == [{"role": "user", "content": asked}]


@pytest.mark.parametrize(
    ("answer", "options", "error", "words", "asked"),
    [
        (says("Hard to say.\n" * 1000), {}, NoVerdict, "no number from 0 to 10 in 3 replies; .*Hard to say", 3),
        (fails(500), {}, ChatUnavailable, "500", 2),
        (says("Score: 5"), {"template": "{row[author]} {text}"}, ValueError, "KeyError\\('author'\\)", 0),
        (says("Score: 5"), {"template": "{row[level][of]}"}, ValueError, "template does not fit .*TypeError", 0),
    ],
)
def test_what_gives_no_number_is_an_error_never_a_zero(answer, options, error, words, asked) -> None:
    with serve(answer) as double:
        with pytest.raises(error, match=words):
            judge(double, **options)
        assert len(double.requests) == asked
