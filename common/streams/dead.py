"""Dead letters: what could not be processed, kept with its reason, for inspection and replay."""

from __future__ import annotations

import re
import time
from typing import Any

import msgpack

from common.errors import UserError
from common.streams.broker import Broker
from common.unpack import MAX_BYTES, unpack

MAX_LETTERS = 10_000
MAX_LETTER = 2 * MAX_BYTES
COUNTED = ("tasks", "samples")  # prefixes of the streams whose entries the sampler counts eventually


def letter(stream: str, reason: str, fields: dict[bytes, bytes], by: str) -> bytes:
    """A dead letter: the stream's entry as it was, and why it could not be processed."""
    return msgpack.packb({"stream": stream, "reason": reason, "fields": fields, "by": by, "at": time.time()})


def add(broker: Broker, letter: bytes) -> None:
    """Add a dead letter; the oldest ones are dropped."""
    bury(broker, "dead", "", "", letter)


def bury(broker: Broker, stream: str, group: str, entry_id: str, letter: bytes) -> None:
    """Move an entry of a stream to the dead letters."""
    broker.call("bury", ("dead", stream, "counters"), [letter, MAX_LETTERS, group, entry_id])


def list_dead(broker: Broker, count: int = 100) -> list[tuple[str, dict[str, Any]]]:
    """The newest dead letters: (id, {stream, reason, fields, by, at})."""
    entries = broker.redis.xrevrange(broker.key("dead"), count=count)
    return [(entry_id.decode(), unpack(fields[b"letter"], MAX_LETTER)) for entry_id, fields in entries]


def replay(broker: Broker, entry_id: str) -> str:
    """Put a dead letter back on its stream, whose name is returned; raises `UserError` if it is no longer there."""
    is_id = re.fullmatch("[0-9]{1,19}-[0-9]{1,19}", entry_id)  # Redis refuses others, or takes them for a range
    entries = broker.redis.xrange(broker.key("dead"), entry_id, entry_id) if is_id else []
    if not entries:
        raise UserError(f"no dead letter {entry_id} in run {broker.run!r}; `spo dead` lists them")
    note = unpack(entries[0][1][b"letter"], MAX_LETTER)
    fields = [item for pair in note["fields"].items() for item in pair]
    arguments = [entry_id, int(note["stream"].startswith(COUNTED)), *fields]
    if not broker.call("replay", ("dead", note["stream"], "counters"), arguments):
        raise UserError(f"dead letter {entry_id} of run {broker.run!r} has been replayed already")
    return str(note["stream"])
