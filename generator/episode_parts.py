"""What episodes are run and scored with, except the engine.

It is made before the engine starts, which takes a minute for a large model: errors in the configuration are reported at
once, and a sandbox that does not isolate programs stops the generator before the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.config import Config, SandboxConfig
from common.errors import UserError
from generator.formats import CodeBlocks, make_format
from generator.rewards import Scorer
from generator.text.template import ChatTemplate
from generator.tools import Toolbox
from generator.users import load_user
from sandbox_client import Sandbox, make_sandbox
from sandbox_client.ready import wait_until_ready


class SharedSandbox:
    """A generator's sandbox, made when it is first needed. All parts share it, so its limits hold for them together."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.made: Sandbox | None = None

    def __call__(self) -> Sandbox:
        if self.made is None:
            self.made = make_sandbox(self.config)
        return self.made


class EpisodeParts:
    """Tools, call format, simulated user and rewards of a run; for one event loop.

    Raises:
        UserError: one of them cannot be found or made, or tools and call format do not fit together.
    """

    def __init__(self, config: Config) -> None:
        episode = config.episode
        self.sandbox = SharedSandbox(config.sandbox)
        self.scorer = Scorer(config, self.sandbox)
        self._users = load_user(config, self.scorer, self.sandbox)
        self.user = self._users.user if self._users else None
        provided: dict[str, Callable[[], Any]] = {
            "sandbox": self.sandbox,
            "memory_mb": lambda: config.sandbox.memory_mb,
        }
        self.toolbox = Toolbox(episode, provided)
        self.call_format = make_format(episode.call_format)
        if isinstance(self.call_format, CodeBlocks) and list(self.toolbox.tools) != ["code_interpreter"]:
            raise UserError(
                "episode.call_format = 'code' can call one tool, named code_interpreter; episode.tools = "
                f"{episode.tools!r} names {', '.join(self.toolbox.tools) or 'none'}"
            )

    def chat_template(self, tokenizer: Any) -> ChatTemplate:
        """The tokenizer's template; raises `UserError` where it cannot show what tools or the user say."""
        # A template describes tools where it also renders their results.
        rendered = self.call_format.wrap is None
        template = ChatTemplate(tokenizer, self.toolbox.schemas() if rendered else None)
        if self.toolbox.tools and rendered:
            template.require("tool", "episode.tools", "or episode.call_format=code")
        if self.user is not None:
            template.require("user", "episode.user", "or no simulated user")
        return template

    async def ready(self, log: Any) -> None:
        """Wait for the sandbox, if a part needs one; raises `UserError` if it cannot be used."""
        if self.sandbox.made is not None:
            await wait_until_ready(self.sandbox.made, self.sandbox.config.wait, log)

    async def close(self) -> None:
        """End what was started."""
        await self.scorer.close()
        await self.toolbox.close()
        if self._users is not None:
            await self._users.close()
        if self.sandbox.made is not None:
            await self.sandbox.made.close()
