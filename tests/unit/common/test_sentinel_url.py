"""Addresses of sentinels: what is read from them, and what is refused with its reason."""

from __future__ import annotations

import pytest

from common.config import parse_config
from common.config.redis_url import SentinelUrl
from common.errors import UserError
from common.network import without_password

BASE = {"model": {"path": "m"}, "data": {"train": "t"}}


@pytest.mark.parametrize(
    ("url", "read"),
    [
        (
            "redis+sentinel://a:26379,b:26380,10.0.0.3:1/spo/2",
            SentinelUrl((("a", 26379), ("b", 26380), ("10.0.0.3", 1)), "spo", 2),
        ),
        ("redis+sentinel://a/spo", SentinelUrl((("a", 26379),), "spo", 0)),
        ("redis+sentinel://[::1]:7,[fe80::2]/spo/", SentinelUrl((("::1", 7), ("fe80::2", 26379)), "spo", 0)),
        ("redis+sentinel://:p%40ss@a:1/spo", SentinelUrl((("a", 1),), "spo", 0, None, "p@ss")),
        (
            "rediss+sentinel://a:1/spo/0?ssl_ca_certs=/etc/ca.crt&ssl_check_hostname=false",
            SentinelUrl((("a", 1),), "spo", tls={"ssl_ca_certs": "/etc/ca.crt", "ssl_check_hostname": False}),
        ),
        ("rediss+sentinel://a:1/spo", SentinelUrl((("a", 1),), "spo", tls={})),
        ("redis+sentinel://asks:it@a:1,b:2/spo/1", SentinelUrl((("a", 1), ("b", 2)), "spo", 1, "asks", "it")),
    ],
)
def test_an_address_names_sentinels_service_database_and_login(url: str, read: SentinelUrl) -> None:
    assert SentinelUrl.parse(url) == read
    assert parse_config(BASE | {"broker": {"url": url}}).broker.url == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://a:1,b:2", "it names no SERVICE, the sentinels' name for the master"),
        ("redis+sentinel://a:1,b:2//0", "it names no SERVICE, the sentinels' name for the master"),
        ("redis+sentinel://a:1/spo/first", "DB 'first' is no number"),
        ("redis+sentinel://a:1,/spo/0", "'' is no HOST:PORT"),
        ("redis+sentinel:///spo/0", "'' is no HOST:PORT"),
        ("redis+sentinel://a:port/spo/0", "'a:port' is no HOST:PORT"),
        ("redis+sentinel://a:0/spo/0", "'a:0' is no HOST:PORT"),
        ("redis+sentinel://a:65536/spo/0", "'a:65536' is no HOST:PORT"),
        (
            "redis+sentinel://a:1/spo/0?ssl_ca_certs=x",
            r"options \(behind a \?\) are those of TLS, with rediss\+sentinel://",
        ),
        ("rediss+sentinel://a:1/spo/0?ssl=1", r"option 'ssl' is none of ssl_ca_certs, .*"),
        ("rediss+sentinel://a:1/spo/0?ssl_check_hostname=no", "ssl_check_hostname=no must be true or false"),
    ],
)
def test_an_address_that_is_none_is_refused_with_its_reason_and_the_form(url: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"broker.url = .*{why}; it must be of the form redis\+sentinel://HOST:PORT,"):
        parse_config(BASE | {"broker": {"url": url}})


def test_another_kind_of_address_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(UserError, match=r"rediss://, unix://, redis\+sentinel:// or rediss\+sentinel://"):
        parse_config(BASE | {"broker": {"url": "valkey+sentinel://a:1/spo/0"}})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@a:1/0", "redis://:***@a:1/0"),
        ("redis+sentinel://me:se:c@ret@a:1,b:2/spo/0", "redis+sentinel://me:***@a:1,b:2/spo/0"),
        ("rediss+sentinel://a:1/spo/0?ssl_password=secret", "rediss+sentinel://a:1/spo/0?ssl_password=***"),
        ("redis://a:1/0", "redis://a:1/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_refused_address_shows_no_password() -> None:
    with pytest.raises(UserError) as caught:
        parse_config(BASE | {"broker": {"url": "redis+sentinel://:secret@a:1"}})
    assert "secret" not in str(caught.value)
