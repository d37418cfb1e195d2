"""Secrets in the configuration itself are shown and written nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from common.config import BrokerConfig, dump_config, load_config, parse_config
from common.config.load import override
from common.config.shared import address_without_password
from common.errors import UserError
from common.network import without_password
from common.streams.agreement import agree
from common.streams.broker import Broker, connect
from tests.support.sampler import make_config

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "public"),
    [
        (f"redis://:{SECRET}@host:6379/0", "redis://host:6379/0"),
        (f"rediss://trainer:{SECRET}@host/1?ssl_ca_certs=ca.pem", "rediss://trainer@host/1?ssl_ca_certs=ca.pem"),
        (f"redis://host:6379/0?password={SECRET}&db=2", "redis://host:6379/0?db=2"),
        (f"redis+sentinel://me:se:c@{SECRET}@a:1,b:2/spo/0", "redis+sentinel://me@a:1,b:2/spo/0"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
    ],
)
def test_an_address_without_its_password_still_leads_there(url: str, public: str) -> None:
    assert address_without_password(url) == public
    shown = without_password(url)
    assert SECRET not in shown
    assert (shown == url) == (SECRET not in url)


def test_the_written_configuration_has_no_secrets(tmp_path: Path, fake_broker: Broker) -> None:
    broker, sandbox = {"url": f"redis://:{SECRET}@host:6379/0"}, {"url": "http://host:1", "token": SECRET}
    config = make_config(tmp_path, broker=broker, sandbox=sandbox)
    text = dump_config(config)
    assert SECRET not in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("#")] == ["broker.url", "sandbox.token"]
    assert parse_config(yaml.safe_load(text)).broker.url == "redis://host:6379/0"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml", environ={"SPO__SANDBOX__TOKEN": '"12345"'}).sandbox.token == "12345"
    agree(fake_broker, config)
    agree(fake_broker, make_config(tmp_path))
    stored = fake_broker.redis.get(fake_broker.key("config"))
    assert SECRET.encode() not in stored
    assert b"host:6379" not in stored


@pytest.mark.parametrize(
    "wrong",
    [
        f"redis://:{SECRET}/x@host:6379/0",
        f"redis://:{SECRET}#x@host:6379/0",
        f"redis+sentinel://:{SECRET}@host/",
    ],
)
def test_a_refused_address_shows_no_password(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UserError, match=r"broker\.url") as refused:
        make_config(tmp_path, broker={"url": wrong})
    assert SECRET not in str(refused.value)


def test_other_mistakes_do_not_show_it_either(tmp_path: Path) -> None:
    for section in ({"token": [SECRET]}, {"url": f"ftp://u:{SECRET}@h"}, {"url": [f"http://u:{SECRET}@h"]}):
        with pytest.raises(UserError, match="sandbox") as refused:
            make_config(tmp_path, sandbox=section)
        assert SECRET not in str(refused.value)
    for item in (f"redis://:{SECRET}@host", f"broker.url.x=redis://:{SECRET}@host"):
        with pytest.raises(UserError) as refused:
            override({"broker": {"url": ""}}, [item])
        assert SECRET not in str(refused.value)
    with pytest.raises(UserError, match="no Redis at") as refused:
        connect(BrokerConfig(url=f"redis://:{SECRET}@127.0.0.1:1", wait=0), "run")
    assert SECRET not in str(refused.value)
