"""Addresses of this machine alone, and requests that are tried again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from typing import Any

import pytest

from common.errors import UserError
from common.network import (
    MAX_REASON,
    Retries,
    RetriesExhausted,
    RetryableError,
    check_bind,
    excerpt,
    is_loopback,
    is_this_machine,
    read_at_most,
    retry_after,
)
from tests.support.sandbox_double import Time


@pytest.mark.parametrize(
    ("host", "loopback", "own"),
    [
        *((host, True, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False, False) for host in ("192.0.2.1", "2001:db8::1", "no-such-host.invalid", "")),
        *((host, False, None) for host in ("0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "*")),
    ],
)
def test_addresses_of_this_machine_alone(host: str, loopback: bool, own: bool | None) -> None:
    assert is_loopback(host) == loopback
    if own is not None:  # others depend on the machine
        assert is_this_machine(host) == own


def test_an_address_open_to_the_network_needs_keys() -> None:
    check_bind("tcp://[::1]:*", None, "bind")
    check_bind("tcp://0.0.0.0:5000", "keys", "bind")
    with pytest.raises(UserError, match=r"bind = 'tcp://0.0.0.0:5000' is open to the network without keys"):
        check_bind("tcp://0.0.0.0:5000", None, "bind")
    with pytest.raises(UserError, match=r"bind = '127.0.0.1:5000' must be of the form tcp://host:port"):
        check_bind("127.0.0.1:5000", None, "bind")


def asked(
    *replies: Any,
    attempts: int = 5,
    seconds: float | None = None,
    each: Callable[[], Any] = lambda: None,
    **limits: Any,
) -> tuple[Any, Time]:
    """(what came of it, time) where attempts end with these replies; exceptions are raised, the last one for ever."""
    moment, left = Time(), list(replies)
    retries = Retries(attempts, **{"first": 1.0, "longest": 4.0} | limits, clock=moment.clock, sleep=moment.sleep)

    async def attempt() -> Any:
        each()
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def scene() -> Any:
        try:
            return await retries(attempt, seconds)
        except RetriesExhausted as error:
            return str(error)

    return asyncio.run(scene()), moment


def test_the_first_result_is_the_result() -> None:
    found, moment = asked("89")
    assert (found, moment.sleeps) == ("89", [])


def test_pauses_double_up_to_the_longest_less_up_to_half() -> None:
    found, moment = asked(RetryableError("busy"), attempts=6)
    assert found == "no result in 6 attempts; last: busy"
    for slept, most in zip(moment.sleeps, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
        assert most / 2 <= slept <= most


def test_the_last_reason_is_reported() -> None:
    assert (
        asked(RetryableError("busy"), TimeoutError(), attempts=2)[0]
        == "no result in 2 attempts; last: no answer in time"
    )


def test_other_errors_are_not_asked_again() -> None:
    with pytest.raises(ValueError, match="refused"):
        asked(ValueError("refused"))


@pytest.mark.parametrize(("limit", "slept"), [(float("inf"), 17.0), (10.0, 10.0)])
def test_a_server_s_wish_is_kept_up_to_a_limit(limit: float, slept: float) -> None:
    assert asked(RetryableError("later", 17.0), "89", max_retry_after=limit)[1].sleeps == [slept]


def test_no_pause_leads_past_the_deadline() -> None:
    found, moment = asked(RetryableError("later", 60.0), seconds=60.0)
    assert (found, moment.sleeps) == ("no result in 1 attempts; last: later", [])
    found, moment = asked(RetryableError("busy"), attempts=1000, seconds=30.0)
    assert 25 < sum(moment.sleeps) < 30


def test_an_attempt_is_cut_at_the_deadline() -> None:
    async def scene() -> None:
        with pytest.raises(RetriesExhausted, match="no result in 1 attempts; last: no answer in time"):
            await Retries(5, 1.0, 4.0)(asyncio.Event().wait, 0.01)

    asyncio.run(scene())


def test_no_more_is_read_than_allowed() -> None:
    taken = []

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(100):
            taken.append(i)
            yield b"abc"

    assert asyncio.run(read_at_most(chunks(), 7)) == b"abcabca"
    assert len(taken) == 3


@pytest.mark.parametrize("value", ["soon", "-5", "", "1e3", "9" * 5000, "ÿ", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_retry_after_that_says_nothing_is_none(value: str) -> None:
    assert retry_after(value) == 0.0


def test_a_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after("17") == 17.0
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60


def test_a_server_s_answer_becomes_one_short_printable_line() -> None:
    assert excerpt("no\x1b[2J pod\n\tleft\u2028") == r"no\x1b[2J pod left"
    assert excerpt(b"caf\xc3\xa9 \xff") == "café \ufffd"
    assert len(excerpt("x y" * 1_000_000)) == MAX_REASON
    assert excerpt("\n") == excerpt(b"") == "(nothing)"
