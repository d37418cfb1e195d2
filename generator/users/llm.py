"""A user played by a language model behind any OpenAI-compatible endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import UserError
from generator.chat.template import Message
from generator.chat_api import ChatApi
from generator.users.base import UserTurn

MAX_SHOWN = 8_192  # characters of one assistant's turn
SYSTEM = """You play a user who talks to an assistant. {persona}
What you want: {goal}
Write the user's next message and nothing else: short, in the user's own words.
When you have got what you want, or it is clear that you will not, write {stop_word} and nothing else."""


@dataclass(slots=True)
class _Role:
    system: str
    turns: int = 0


class LlmUser:
    """Reads the conversation from the other side and writes the user's next message.

    Args:
        base_url, model, api_key_env, concurrency, timeout, attempts: the endpoint, see `ChatApi`.
        persona: a sentence or two about the user.
        goal_column: column of the data row that says what the user wants.
        system: the player's system prompt; {persona}, {goal} and {stop_word} are filled in.
        stop_word: the player writes it to end the conversation.
        max_turns: maximum number of the user's messages after the prompt.
        temperature, max_tokens: of the player's sampling.
        parameters: further parameters of the request, for example {chat_template_kwargs: {enable_thinking: false}}.
    """

    rewards = False

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        persona: str = "",
        goal_column: str = "goal",
        system: str = SYSTEM,
        stop_word: str = "[STOP]",
        max_turns: int = 5,
        temperature: float = 0.7,
        max_tokens: int = 256,
        parameters: dict[str, Any] | None = None,
        concurrency: int = 32,
        timeout: float = 60.0,
        attempts: int = 4,
    ) -> None:
        if max_turns < 1 or not stop_word:
            raise UserError(f"max_turns = {max_turns} must be at least 1 and stop_word = {stop_word!r} not empty")
        self.api = ChatApi(
            base_url, model, api_key_env=api_key_env, concurrency=concurrency, timeout=timeout, attempts=attempts
        )
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens, **(parameters or {})}
        self._system = system.replace("{persona}", persona).replace("{stop_word}", stop_word)
        self._goal_column, self._stop_word, self._max_turns = goal_column, stop_word, max_turns
        self._roles: dict[str, _Role] = {}

    async def start(self, episode_id: str, *, row: dict[str, Any], **_: Any) -> None:
        """Read the goal; raises `ValueError` if the row has none."""
        goal = row.get(self._goal_column)
        if not isinstance(goal, str) or not goal.strip():
            raise ValueError(f"column {self._goal_column!r} must say what the user wants, got {goal!r}")
        self._roles[episode_id] = _Role(self._system.replace("{goal}", goal))

    async def respond(self, episode_id: str, messages: list[Message]) -> UserTurn:
        """The player's next message; raises `ChatUnavailable` if the endpoint fails."""
        role = self._roles[episode_id]
        if role.turns == self._max_turns:
            return UserTurn(True)
        role.turns += 1
        message = spoken(await self.api.complete(other_side(role.system, messages), **self._sampling))
        if not message or self._stop_word in message:
            return UserTurn(True, metadata={"said": message})
        return UserTurn(False, message)

    async def finish(self, episode_id: str) -> None:
        self._roles.pop(episode_id, None)

    async def close(self) -> None:
        await self.api.close()


def other_side(system: str, messages: list[Message]) -> list[Message]:
    """The conversation with the roles swapped: for the player, the assistant is the user.

    Tool calls and their results stay between the assistant and the tools. Roles alternate, as many templates require.
    """
    seen: list[Message] = [{"role": "user", "content": "(The conversation begins. Your first message, please.)"}]
    for position, message in enumerate(messages):
        follower = messages[position + 1]["role"] if position + 1 < len(messages) else ""
        if message["role"] == "assistant" and follower != "tool":
            role, text = "user", spoken(str(message["content"] or ""))[:MAX_SHOWN] or "(The assistant says nothing.)"
        elif message["role"] == "user":
            role, text = "assistant", str(message["content"] or "")[:MAX_SHOWN]
        else:
            continue
        if seen[-1]["role"] == role:
            seen[-1] = {"role": role, "content": f"{seen[-1]['content']}\n\n{text}"}
        else:
            seen.append({"role": role, "content": text})
    return [{"role": "system", "content": system}, *seen]


def spoken(text: str) -> str:
    """The text of a reply after its thinking."""
    return text.rpartition("</think>")[2].strip()
