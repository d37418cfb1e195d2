"""Simulated users: who answers the assistant in a conversation of several turns."""

from __future__ import annotations

from generator.users.base import BadUserTurn, Checker, UserSimulator, UserTurn, Verdict
from generator.users.load import Users, load_user
from generator.users.session import Conversation, conversation

__all__ = [
    "BadUserTurn",
    "Checker",
    "Conversation",
    "UserSimulator",
    "UserTurn",
    "Users",
    "Verdict",
    "conversation",
    "load_user",
]
