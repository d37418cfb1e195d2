"""Addresses and requests that are tried again; what others have written reaches no terminal active, views name it."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from rich.console import Console

from common import log as logs
from common import network
from common.checks.check import problem
from common.config import WeightsConfig
from common.errors import UserError, fail
from common.network import Retries, RetriesExhausted, RetryableError, check_bind, excerpt, retry_after
from common.process import Role
from common.streams.broker import Broker
from common.streams.presence import Presence
from common.streams.relays import announce, machine_name, nearby, withdraw
from launcher import status as inspection
from launcher.checks import command
from launcher.run.display import figures, process_rows
from launcher.run.progress import Progress
from launcher.run.summary import Summary, table
from tests.support.sandbox_double import Time


def test_addresses_of_this_machine_alone() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert network.is_loopback(host)
        assert network.is_this_machine(host)
    for host in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid", "", "node..1", "a" * 64):
        assert not network.is_loopback(host)
        assert not network.is_this_machine(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "*"):
        assert not network.is_loopback(host)


@pytest.mark.parametrize(
    ("environ", "variables"),
    [
        ({}, ["127.0.0.1,localhost,::1"] * 2),
        ({"no_proxy": "localhost,a"}, ["localhost,a,127.0.0.1,::1"] * 2),
        ({"no_proxy": "a", "NO_PROXY": "b"}, ["a,127.0.0.1,localhost,::1", "b,127.0.0.1,localhost,::1"]),
        ({"NO_PROXY": "*"}, ["*", "*"]),
    ],
)
def test_loopback_is_added_to_what_goes_through_no_proxy(environ: dict[str, str], variables: list[str]) -> None:
    added = network.without_proxy_on_loopback(environ)
    assert added == dict(zip(("no_proxy", "NO_PROXY"), variables, strict=True))
    assert network.without_proxy_on_loopback(environ | added) == added


def test_an_address_open_to_the_network_needs_keys() -> None:
    check_bind("tcp://[::1]:*", None, "bind")
    check_bind("tcp://0.0.0.0:5000", "keys", "bind")
    with pytest.raises(UserError, match=r"bind = 'tcp://0.0.0.0:5000' is open to the network without keys"):
        check_bind("tcp://0.0.0.0:5000", None, "bind")
    with pytest.raises(UserError, match=r"bind = '127.0.0.1:5000' must be of the form tcp://host:port"):
        check_bind("127.0.0.1:5000", None, "bind")


def asked(*replies: Any, attempts: int = 5, seconds: float | None = None, **limits: Any) -> tuple[Any, list[float]]:
    """The outcome and the pauses of attempts with these replies: exceptions are raised, and the last reply repeats."""
    moment, left = Time(), list(replies)
    retries = Retries(attempts, 1.0, 4.0, clock=moment.clock, sleep=moment.sleep, **limits)

    async def attempt() -> Any:
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def scene() -> Any:
        try:
            return await retries(attempt, seconds)
        except RetriesExhausted as error:
            return str(error)

    return asyncio.run(scene()), moment.sleeps


def test_pauses_double_up_to_the_longest_less_up_to_half() -> None:
    assert asked("89") == ("89", [])
    outcome, pauses = asked(RetryableError("busy"), attempts=6)
    assert outcome == "no result in 6 attempts; last: busy"
    for slept, most in zip(pauses, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
        assert most / 2 <= slept <= most
    outcome, _ = asked(RetryableError("busy"), TimeoutError(), attempts=2)
    assert outcome == "no result in 2 attempts; last: no answer in time"


def test_a_server_s_wish_is_kept_up_to_a_limit() -> None:
    assert asked(RetryableError("later", 17.0), "89")[1] == [17.0]
    assert asked(RetryableError("later", 17.0), "89", max_retry_after=10.0)[1] == [10.0]


def test_neither_pause_nor_attempt_leads_past_the_deadline() -> None:
    assert asked(RetryableError("later", 60.0), seconds=60.0) == ("no result in 1 attempts; last: later", [])
    assert 25 < sum(asked(RetryableError("busy"), attempts=1000, seconds=30.0)[1]) < 30
    with pytest.raises(RetriesExhausted, match="no result in 1 attempts; last: no answer in time"):
        asyncio.run(Retries(5, 1.0, 4.0)(lambda: asyncio.Event().wait(), 0.01))


def test_a_retry_after_is_seconds_or_a_date_or_nothing() -> None:
    assert retry_after("17") == 17.0
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    for value in ("soon", "-5", "", "1e3", "9" * 5000, "ÿ", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert retry_after(value) == 0.0


def test_a_server_s_answer_becomes_one_short_printable_line() -> None:
    assert excerpt("no\x1b[2J pod\n\tleft\u2028") == r"no\x1b[2J pod left"
    assert excerpt(b"caf\xc3\xa9 \xff") == "café \ufffd"
    assert len(excerpt("x y" * 1_000_000)) == network.MAX_REASON
    assert excerpt("\n") == excerpt(b"") == "(nothing)"


# A title, a bell, a cursor movement, an 8-bit CSI, a line that overwrites the one before, rich's markup, reversed text.
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\r[bold]\u202e"
ACTIVE = "\x1b\x07\x9b\r\u202e"


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    hook = sys.excepthook
    monkeypatch.setenv("SPO_LOG", request.param)
    yield logs.setup("role", file=tmp_path / "log")
    sys.excepthook = hook


def shown(*renderables: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=300)
    console.print(*renderables)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check(text: str, *words: str) -> None:
    """No character of a text is active, and these words are in it."""
    assert not any(character in text for character in ACTIVE)
    assert all(word in text for word in words)


def test_a_log_line_has_none_and_forges_no_other(log: Any, tmp_path: Path) -> None:
    log.warning(f"event {EVIL}", reason=EVIL, values=[EVIL, ValueError(EVIL)], number=1.5, none=None)
    log.info("event", reason="one\n12:00:00 [info] forged")
    text = (tmp_path / "log").read_text(encoding="utf-8")
    check(text, "title", "1.5")
    assert len(text.splitlines()) == 2
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("failed")
    check((tmp_path / "log").read_text(encoding="utf-8"), "Traceback")


@pytest.mark.usefixtures("log")
def test_a_process_that_dies_and_the_doctor_print_none(capsys: pytest.CaptureFixture[str]) -> None:
    error = ValueError(EVIL)
    sys.excepthook(type(error), error, None)
    check(capsys.readouterr().err, "ValueError")
    with pytest.raises(SystemExit):
        fail(f"cannot read {EVIL}")
    check(capsys.readouterr().err, "cannot read")
    command.report({Role.LEARNER: [problem(EVIL, "redis")]})
    check(capsys.readouterr().out, "title")


def test_the_views_of_a_run_show_none(fake_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(fake_broker, 3)
    progress.processes = {EVIL: {"pid": 1, "host": EVIL, "state": EVIL, "source": EVIL, "role": EVIL}}
    text = shown(process_rows(progress, {}))
    check(text)
    assert text.count("[bold]") == 4  # no markup of rich either
    check(shown(table(Summary(True, 0.1, 0.2, 8, 3, {}, {}, {}, "runs/x", None, {f"{EVIL}/accuracy": 0.5}))))
    note = {"stream": EVIL, "at": 0.0, "by": EVIL, "reason": EVIL, "fields": {}}
    monkeypatch.setattr(inspection.letters, "list_dead", lambda broker: [(EVIL, note)])
    monkeypatch.setattr(inspection, "reopened", lambda config: nullcontext(fake_broker))
    check(shown(inspection.dead_letters(SimpleNamespace())), "title")  # type: ignore[arg-type]


ODD = [
    b"\xff not msgpack", b"", msgpack.packb(7), msgpack.packb(None), msgpack.packb([1, 2]), msgpack.packb({}),
    msgpack.packb({"role": 1, "host": [], "pid": "x", "state": None, "version": "1", "accuracy": "high", "at": "now"}),
    msgpack.packb({"role": "generator", "host": "h", "pid": 1, "state": "running", "tokens_per_second": "many",
                   "version": 1, "accuracy": 0.5, "samples": 2, "figures": {"accuracy": "high"}, "at": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_the_views_say_what_cannot_be_read_and_show_the_rest(fake_broker: Broker, odd: bytes) -> None:
    redis, key = fake_broker.redis, fake_broker.key
    Presence(fake_broker, "sampler-1", "sampler").beat()
    redis.hset(key("processes"), b"other\xff", odd)
    redis.zadd(key("alive"), {b"other\xff": time.time() * 1000})
    redis.hset(key("evaluations"), "0", msgpack.packb({"version": 0, "accuracy": 0.25, "samples": 4}))
    redis.hset(key("evaluations"), "1", odd)
    progress = Progress(fake_broker, steps=8)
    assert progress.refresh()
    assert progress.processes["other\ufffd"]["state"] == "unreadable"
    assert [process["state"] for process in progress.of_role("sampler")] == ["starting"]
    assert [result["accuracy"] for result in progress.evaluations] == [0.25]
    rows = shown(figures(progress), process_rows(progress, {})).splitlines()
    assert any("other" in row and "unreadable" in row for row in rows)
    assert any(row.split()[:3] == ["unreadable", "1", "evaluations,"] for row in rows)
    announce(fake_broker, "node-1", "good", {"address": "tcp://127.0.0.1:1"})
    redis.hset(key("relays:node-1"), "odd", odd)
    assert [relay["name"] for relay in nearby(fake_broker, "node-1")] == ["good"]


def test_neighbours_find_the_relays_that_live_and_others_do_not(broker: Broker) -> None:
    announce(broker, "node-1", "b", {"address": "tcp://127.0.0.1:2", "snapshot": "ab-3"})
    announce(broker, "node-1", "a", {"address": "tcp://127.0.0.1:1"})
    announce(broker, "node-2", "c", {"address": "tcp://127.0.0.1:3"})
    long_ago = {"name": "dead", "address": "tcp://127.0.0.1:2", "at": time.time() - 3600}
    broker.redis.hset(broker.key("relays:node-1"), "dead", msgpack.packb(long_ago))
    assert nearby(broker, "node-1") == [
        {"name": "a", "address": "tcp://127.0.0.1:1"},
        {"name": "b", "address": "tcp://127.0.0.1:2", "snapshot": "ab-3"},
    ]
    assert nearby(broker, "node-3") == []
    assert 0 < broker.redis.pttl(broker.key("relays:node-1")) <= 1000 * broker.dead_after
    withdraw(broker, "node-1", "a")
    assert [relay["name"] for relay in nearby(broker, "node-1")] == ["b"]


def test_a_machine_is_called_as_configured_or_by_its_host_name() -> None:
    assert machine_name(WeightsConfig()) == socket.gethostname()
    assert machine_name(WeightsConfig(host="node-1")) == "node-1"
