"""The quickstart's tasks, by name. Imports no torch."""

from __future__ import annotations

from common.errors import UserError
from launcher.tasks import arithmetic, code, corrector, dialogue
from launcher.tasks.room import Room

ROOMS = {room.name: room for room in (arithmetic.ROOM, code.ROOM, corrector.ROOM, dialogue.ROOM)}
DEFAULT = arithmetic.ROOM


def find_room(name: str) -> Room:
    """The task of a name; raises `UserError` where there is none."""
    if name not in ROOMS:
        raise UserError(f"no task {name!r}; there is {', '.join(ROOMS)}")
    return ROOMS[name]
