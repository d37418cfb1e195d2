"""A run without a learner: generators answer with the model they started with."""

from __future__ import annotations

import json

import pytest
import structlog

from common.config import parse_config
from common.errors import UserError
from common.payload import open_record
from common.preflight.context import Context
from common.preflight.machine import read_machine
from common.preflight.start import check_start
from common.preflight.steps import learner_steps
from common.process import Role
from common.streams.broker import Broker
from tests.support.generator import Rig, make_generator

LOG = structlog.get_logger()
TREE = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}}


def test_tasks_for_offline_values_are_answered_by_version_0_and_leave_no_payload(fake_broker: Broker) -> None:
    rig = Rig(fake_broker, run={"steps": 0})
    rig.generator = make_generator(rig.config, fake_broker, rig.inbox, rig.engine, None, LOG)
    rig.dispatch(5, kind="values", answer="7")
    headers = rig.play(lambda rig: rig.headers(5))
    assert {(header.kind, header.reward, header.newest_version) for header in headers} == {("values", 1.0, 0)}
    assert {json.loads(open_record(header.record))["output"] for header in headers} == {"7<|im_end|>"}
    assert fake_broker.redis.keys(fake_broker.key("payload:") + "*") == []
    assert fake_broker.redis.keys(fake_broker.key("previous:") + "*") == []


@pytest.mark.parametrize("role", [Role.SAMPLER, Role.LEARNER, Role.RELAY])
def test_who_trains_has_no_place_in_it(role: Role) -> None:
    config = parse_config(TREE | {"run": {"steps": 0}})
    with pytest.raises(UserError, match=rf"run\.steps = 0 is a run without a learner.* for a {role}; set it to 1"):
        check_start(role, config)


@pytest.mark.parametrize(("role", "steps"), [(Role.GENERATOR, 0), (Role.GENERATOR, 1), (Role.LEARNER, 1)])
def test_everyone_else_has(role: Role, steps: int) -> None:
    config = parse_config(TREE | {"run": {"steps": steps}})
    assert learner_steps(Context(role, read_machine(), config), config) is None
