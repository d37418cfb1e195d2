"""Results of tasks: stored under the id of the entry that was leased, whatever the generator calls them."""

from __future__ import annotations

import pytest

from common.streams import dead
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import Finished, TaskInbox
from tests.support.streams import dispatch, finished, payload


@pytest.fixture
def ledger(broker: Broker) -> SamplerLedger:
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    return ledger


def test_a_result_under_a_wrong_id_sets_aside_the_task_it_was_leased_for(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 2)
    inbox = TaskInbox(broker, "a")
    first, second = inbox.take(2, 0)
    wrong = finished(second)
    assert inbox.finish([Finished(first.entry_id, wrong.header, payload())]) == 1
    ((_, header),) = ledger.read(block_ms=0)
    assert (header.task_id, header.status) == (first.task.task_id, "set_aside")
    assert second.task.task_id in header.reason
    assert broker.payloads("payload", [second.task.task_id]) == [None]
    assert "names" in dead.list_dead(broker)[0][1]["reason"]


def test_a_dead_letter_is_replayed_once_and_counts_as_dispatched_again(broker: Broker, ledger: SamplerLedger) -> None:
    dispatch(ledger, 1)
    inbox = TaskInbox(broker, "a")
    inbox.finish([inbox.set_aside(inbox.take(1, 0)[0], "the engine failed")])
    ledger.commit(Commit(counted=[entry for entry, _ in ledger.read(block_ms=0)], outstanding_remove=["t0"]))
    ((letter, _),) = dead.list_dead(broker)
    dead.replay(broker, letter)
    with pytest.raises(Exception, match="no dead letter"):
        dead.replay(broker, letter)
    inbox.finish([finished(delivery) for delivery in inbox.take(5, 0)])
    ledger.commit(Commit(counted=[entry for entry, _ in ledger.read(block_ms=0)]))
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == 2
