"""Simulated users, which answer the assistant in a conversation of several turns."""

from __future__ import annotations

from generator.users.base import BadUserTurn, Checker, Conversation, UserSimulator, UserTurn, Verdict, conversation
from generator.users.load import load_user

__all__ = [
    "BadUserTurn",
    "Checker",
    "Conversation",
    "UserSimulator",
    "UserTurn",
    "Verdict",
    "conversation",
    "load_user",
]
