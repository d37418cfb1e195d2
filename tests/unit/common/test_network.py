"""Addresses of this machine alone, and requests that are tried again."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Any

import pytest

from common import network
from common.errors import UserError
from common.network import Retries, RetriesExhausted, RetryableError, check_bind, excerpt, retry_after
from tests.support.sandbox_double import Time


def test_addresses_of_this_machine_alone() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert network.is_loopback(host)
        assert network.is_this_machine(host)
    for host in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid", ""):
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
