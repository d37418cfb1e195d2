"""A run without a learner: generators answer with the model they started with."""

from __future__ import annotations

import json

import structlog

from common.payload import open_record
from common.streams.broker import Broker
from tests.support.generator import Rig, make_generator

LOG = structlog.get_logger()


def test_tasks_for_offline_values_are_answered_by_version_0_and_leave_no_payload(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, run={"steps": 0})
    rig.generator = make_generator(rig.config, fake_broker, rig.inbox, rig.engine, None, LOG)
    rig.dispatch(5, kind="values", answer="7")
    headers = rig.play(lambda rig: rig.headers(5))
    assert {(header.kind, header.reward, header.newest_version) for header in headers} == {("values", 1.0, 0)}
    assert {json.loads(open_record(header.record))["output"] for header in headers} == {"7<|im_end|>"}
    assert fake_broker.redis.keys(fake_broker.key("payload:") + "*") == []
    assert fake_broker.redis.keys(fake_broker.key("previous:") + "*") == []
