"""What a container's health check asks."""

from __future__ import annotations

import socket

import pytest

from common.config import parse_config
from common.health import alive
from common.process import Role
from common.streams.broker import connect
from common.streams.presence import Presence
from tests.conftest import RedisServer

pytestmark = pytest.mark.integration


def test_a_process_is_healthy_while_its_heartbeat_is_heard(redis_server: RedisServer) -> None:
    config = parse_config(
        {"run": {"name": "health"}, "model": {"path": "m"}, "data": {"train": "t"}, "broker": {"url": redis_server.url}}
    )
    here = socket.gethostname()
    assert not alive(config, Role.GENERATOR, here)
    with Presence(connect(config.broker, "health"), "generator-1", "generator"):
        assert alive(config, Role.GENERATOR, here)
        assert not alive(config, Role.GENERATOR, f"{here}-other")
        assert not alive(config, Role.LEARNER, here)
    assert not alive(config, Role.GENERATOR, here)
