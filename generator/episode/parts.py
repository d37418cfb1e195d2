"""What episodes need besides the engine: tools, call format, simulated user, rewards, sandbox.

The parts are made before the engine, which takes a minute for a large model: errors in the configuration are
reported at once, and a sandbox that does not isolate programs stops the generator before the wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.config import Config, EpisodeConfig, SandboxConfig
from common.config.data import SIDES, Side, Source
from common.errors import UserError, nearest
from common.messages import Failure, Task
from common.model import end_ids
from generator.chat.template import ChatTemplate
from generator.chat.token_text import load_tokenizer
from generator.concurrency import close_all
from generator.formats import CodeBlocks, make_format
from generator.rewards import Scorer
from generator.tools import Toolbox
from generator.users import load_user
from sandbox_client import Sandbox, make_sandbox, wait_until_ready

# The keys of `episode` that a scorer reads: the reward, its options and limits, and how turn rewards are added.
SCORING = {name for name in EpisodeConfig.model_fields if "reward" in name}


class UnknownSource(Exception):
    """A task comes from a source that the configuration does not have."""

    failure = Failure.UNKNOWN_SOURCE


class SharedParts:
    """One sandbox, and one scorer (with its processes and connections) for all parts with the same rewards."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sandbox: Sandbox | None = None
        self._scorers: list[tuple[Any, Scorer]] = []  # with what they were made from

    def sandbox(self) -> Sandbox:
        """The generator's sandbox, made when it is first needed; its limits hold for all parts together."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self._config)
        return self._sandbox

    def scorer(self, config: Config) -> Scorer:
        """Return the scorer for a configuration of the run; raises `UserError` like `Scorer`."""
        scoring = config.episode.model_dump(include=SCORING), config.sampler.tracker.reward_range
        for known, scorer in self._scorers:
            if known == scoring:
                return scorer
        scorer = Scorer(config, self.sandbox)
        self._scorers.append((scoring, scorer))
        return scorer

    async def ready(self, log: Any) -> None:
        """Wait for the sandbox, if a part needs one; raises `UserError` if it cannot be used."""
        if self._sandbox is not None:
            await wait_until_ready(self._sandbox, self._config.wait, log)

    async def close(self) -> None:
        await close_all({f"rewards {i}": scorer.close for i, (_, scorer) in enumerate(self._scorers)})
        if self._sandbox is not None:
            await close_all({"sandbox": self._sandbox.close})


class EpisodeParts:
    """Tools, call format, simulated user and rewards of one section `episode`; for one event loop.

    Args:
        shared: sandbox and scorers that other parts use too, which the caller closes; by default these parts' own.

    Raises:
        UserError: one of them cannot be found or made, or tools and call format do not fit together.
    """

    def __init__(self, config: Config, shared: SharedParts | None = None) -> None:
        self.episode = episode = config.episode
        self.answer_column = config.data.answer_column  # by which the user's checker names the answer
        self._shared, self._owns_shared = shared or SharedParts(config.sandbox), shared is None
        self.scorer = self._shared.scorer(config)
        self.user = load_user(config, self._shared.scorer)
        provided = {"sandbox": self._shared.sandbox, "memory_mb": lambda: config.sandbox.memory_mb}
        self.toolbox = Toolbox(episode, provided)
        self.call_format = make_format(episode.call_format)
        if self.call_format.stop and episode.calls_in_thinking is False:
            raise UserError(
                f"episode.calls_in_thinking = false contradicts episode.call_format = {episode.call_format!r}, "
                "which stops a turn after a call, even within <think>; leave it out, or use call_format: hermes"
            )
        if isinstance(self.call_format, CodeBlocks) and list(self.toolbox.tools) != ["code_interpreter"]:
            raise UserError(
                "episode.call_format = 'code' can call one tool, named code_interpreter; episode.tools = "
                f"{episode.tools!r} names {', '.join(self.toolbox.tools) or 'none'}"
            )

    def chat_template(self, tokenizer: Any, config: Config) -> ChatTemplate:
        """See `make_template`."""
        return make_template(tokenizer, config, self.toolbox)

    async def close(self) -> None:
        if close := getattr(self.user, "close", None):
            await close()
        if self._owns_shared:
            await self._shared.close()


def make_template(tokenizer: Any, config: Config, toolbox: Toolbox) -> ChatTemplate:
    """The tokenizer's template for a source; raises `UserError` if it cannot show what tools or the user say."""
    episode, data = config.episode, config.data
    # The template describes the tools only if it also renders their results.
    rendered = make_format(episode.call_format).wrap is None
    schemas = toolbox.schemas() if rendered else None
    template = ChatTemplate(tokenizer, schemas, end_ids(config.model.path), data.template_options)
    _check_options(data.template_variables, template.name, str(tokenizer.chat_template))
    if toolbox.tools and rendered:
        template.require("tool", "episode.tools", "or episode.call_format=code")
    if episode.user is not None:
        template.require("user", "episode.user", "or no simulated user")
    return template


def _check_options(options: Mapping[str, Any], template: str, source: str) -> None:
    """Raise `UserError` for an option whose name does not occur in the template's source."""
    words = set(re.findall(r"[A-Za-z_]\w+", source))
    for name in options:
        if name not in words:
            near = nearest(name, words)
            hint = f"did you mean {near}?" if near else "leave it out"
            raise UserError(f"data.template_options names {name!r}, which {template} does not read; {hint}")


class RunParts:
    """For each source of the data, the configuration of its tasks and the parts that run their episodes.

    Sources share what is equal: the sandbox, the scorers, or all parts. For one event loop.

    Raises:
        UserError: the parts of a source cannot be made; the message names the source if it has an `episode` of its own.
    """

    def __init__(self, config: Config) -> None:
        self.shared = SharedParts(config.sandbox)
        self.parts: list[EpisodeParts] = []
        self.by_source: dict[tuple[Side, str], tuple[Config, EpisodeParts]] = {}
        for side in SIDES:
            for source in config.data.sources(side):
                source_config = config.for_source(source)
                self.by_source[side, source.name] = (source_config, self._parts(source_config, source))

    def check_templates(self, path: str, trust_remote_code: bool) -> None:
        """Raise `UserError` if the chat template of a model does not fit a source; skipped if the model is not here."""
        try:
            tokenizer = load_tokenizer(path, trust_remote_code)
        except UserError:
            return  # the engine downloads it, or reports what is wrong with the model
        for config, parts in self.by_source.values():
            parts.chat_template(tokenizer, config)

    def find(self, task: Task) -> tuple[Side, str]:
        """Key of a task's source in `by_source`; raises `UnknownSource`."""
        has_heldout = any(side == "heldout" for side, _ in self.by_source)
        wanted: Side = "heldout" if task.kind == "eval" and has_heldout else "train"
        names = [name for side, name in self.by_source if side == wanted]
        if task.source in names:
            return wanted, task.source
        if not task.source and len(names) == 1:
            return wanted, names[0]
        raise UnknownSource(f"task {task.task_id} is from source {task.source!r}; data.{wanted} has {', '.join(names)}")

    async def close(self) -> None:
        for parts in self.parts:
            await parts.close()
        await self.shared.close()

    def _parts(self, config: Config, source: Source) -> EpisodeParts:
        for parts in self.parts:
            if (parts.episode, parts.answer_column) == (config.episode, config.data.answer_column):
                return parts
        try:
            parts = EpisodeParts(config, self.shared)
        except UserError as error:
            raise UserError(f"{source.key}: {error}" if source.episode else str(error)) from None
        self.parts.append(parts)
        return parts
