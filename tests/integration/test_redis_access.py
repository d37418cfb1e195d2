"""Access to Redis: TLS, ACL users, and the warnings about a server that lets every client in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from common.config import BrokerConfig
from common.errors import UserError
from common.streams.agreement import agree
from common.streams.broker import Broker, connect
from common.streams.connection import risks
from tests.conftest import RedisServer
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, drive, start
from tests.support.tls import TlsFront, make_certificate

ROOT = Path(__file__).parents[2]


@dataclass
class TlsRedis:
    """Its port, and the certificates: its own, and another's."""

    port: int
    certificate: Path
    other: Path

    def url(self, trusted: Path | None) -> str:
        return f"rediss://127.0.0.1:{self.port}/0" + (f"?ssl_ca_certs={trusted}" if trusted else "")


@pytest.fixture
def tls_redis(tmp_path: Path, own_redis: RedisServer) -> Iterator[TlsRedis]:
    """A real server with TLS in front of it, as stunnel does it: the one in the wheel was built without TLS."""
    certificate, key = make_certificate(tmp_path, "redis")
    other, _ = make_certificate(tmp_path, "other")
    front = TlsFront(own_redis.port, certificate, key)
    yield TlsRedis(front.port, certificate, other)
    front.close()


def refusal(url: str) -> str:
    """The error of an address, without a wait: another attempt would fail in the same way."""
    with pytest.raises(UserError) as refused:
        connect(BrokerConfig(url=url, wait=3600), "run")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def run_whole(broker: Broker, folder: Path, observer: Broker | None = None) -> None:
    """A run by stubs, with everything the scripts do; `observer` may look at all keys."""
    config = make_config(folder, heldout=5)
    agree(broker, config)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.run()
    audited(observer or broker, config)


def test_a_run_goes_over_tls_and_a_wrong_certificate_is_refused(tls_redis: TlsRedis, tmp_path: Path) -> None:
    assert re.search(r"certificate is refused \(.+\); name the certificate", refusal(tls_redis.url(tls_redis.other)))
    assert "certificate is refused" in refusal(tls_redis.url(None))
    broker = connect(BrokerConfig(url=tls_redis.url(tls_redis.certificate), wait=10), "run", log=None)
    broker.dead_after = 60.0
    run_whole(broker, tmp_path)
    broker.redis.close()


def acl_rule() -> list[str]:
    """The rule that the documentation gives."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    match = re.search(r"^user trainer on >PASSWORD (.+)$", text, re.MULTILINE)
    assert match
    return match.group(1).split()


def test_the_documented_acl_user_can_do_a_run_and_no_more(own_redis: RedisServer, tmp_path: Path) -> None:
    admin = redis.Redis.from_url(own_redis.url)
    admin.execute_command("ACL", "SETUSER", "trainer", "reset", "on", ">secret", *acl_rule())
    admin.execute_command("ACL", "SETUSER", "default", "off")
    assert "requires a password" in refusal(own_redis.url)
    assert "requires a password" in refusal(own_redis.url.replace("//", "//trainer:wrong@"))
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~spo:*", "+@read")
    assert "ACL lets this user do less" in refusal(own_redis.url.replace("//", "//reader:secret@"))
    (tmp_path / "password").write_text("secret\n")
    config = BrokerConfig(url=own_redis.url.replace("//", "//trainer@"), password_file=str(tmp_path / "password"))
    broker = connect(config, "run")
    broker.dead_after = 60.0
    run_whole(broker, tmp_path, Broker(admin, "run"))
    for forbidden in ("CONFIG SET dir /", "FLUSHALL", "GET other", "ACL LIST", "KEYS *"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            broker.redis.execute_command(*forbidden.split())
    broker.redis.close()


NO_PASSWORD, NO_TLS = "asks for no password", "without TLS"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"url": "redis://10.0.0.5:6379/0"}, [NO_PASSWORD, NO_TLS]),
        ({"url": "redis://redis:6379/0", "password_file": "password"}, [NO_TLS]),
        ({"url": "rediss://trainer:secret@10.0.0.5:6379/0"}, []),
        ({"url": "redis+sentinel://a:1,b:2/main/0", "password_file": "password"}, [NO_TLS]),
        ({"url": "redis://127.0.0.1:6379/0"}, [f"{NO_PASSWORD}: every account of this machine"]),
        ({"url": "unix:///run/redis.sock"}, []),
    ],
)
def test_the_risk_of_a_redis_that_lets_others_in_is_named(config: dict[str, str], named: list[str]) -> None:
    lines = list(risks(BrokerConfig(**config)))
    assert len(lines) == len(named)
    assert all(text in line for line, text in zip(lines, named, strict=True))
    assert not any("secret" in line for line in lines)
