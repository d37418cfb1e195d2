"""Settings of an agent: a program of the user's own that plays the episodes."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from common.config.section import Section
from common.network import is_tcp

# Request fields that would change the sampling distribution, and that an agent can do without.
Ignorable = Literal[
    "tool_choice", "response_format", "thinking", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_p", "min_tokens", "top_logprobs",
]  # fmt: skip
IGNORABLE: tuple[str, ...] = get_args(Ignorable)


class ContainerConfig(Section):
    """What the container of an agent may use (docs/containers.md); a row's column `container` overrides it."""

    network: str = Field(
        "none", min_length=1, description="Network of the engine that the container joins: `none`, `bridge` or another."
    )
    cpus: float = Field(1.0, gt=0, le=1024, description="Processor cores.")
    memory_mb: int = Field(2048, ge=16, description="Memory in MiB, without swap.")
    processes: int = Field(512, ge=8, description="Processes and threads.")
    disk_mb: int = Field(10240, ge=1, description="What the agent may write to the container's disk, in MiB.")
    start_seconds: float = Field(120.0, gt=0, description="Seconds until a start counts as failed.")
    agent_seconds: float | None = Field(
        None, gt=0, description="Seconds of the agent, beside `episode.max_seconds`; the smaller one ends it."
    )
    grading_seconds: float = Field(
        600.0, gt=0, description="Seconds of the task's tests; longer ones give the lowest reward."
    )


class AgentConfig(Section):
    """A program of your own that plays the episodes and asks the policy over HTTP (docs/agents.md).

    `agent: module:function` is short for a section with this `function`.
    """

    function: str | None = Field(
        None,
        description="`module:function`, or the name of an installed one: called with each task, in the generator's "
        "process; a coroutine function, or any other, which runs in a thread.",
    )
    command: list[str] | None = Field(
        None,
        min_length=1,
        description="Or a program and its arguments, started for each task in a folder of its own. An argument that is "
        "a file's name is given as its absolute path.",
    )
    environment: str | None = Field(
        None,
        description="Or the address `tcp://host:port` of an environment server of `verifiers`, on the generator's "
        "machine: the episodes are played there, and scored (docs/environments.md).",
    )
    image: str | None = Field(
        None,
        min_length=1,
        description="Run the command in a container of this image, one for each task; an image's name, or that of the "
        "column with it. Needs Docker or Podman on the generator's machine (docs/containers.md).",
    )
    container: ContainerConfig = ContainerConfig()
    sandbox: bool = Field(
        False,
        description="Run the command in the sandbox of the generator's machine, from which it reaches the model and "
        "nothing else; for programs that you do not trust. Needs a control group (docs/agents.md).",
    )
    history: Literal["as_sampled", "as_sent"] = Field(
        "as_sampled",
        description="A reply that the agent sends back changed, for example without its thinking: `as_sampled` "
        "continues the tokens that the model sampled, `as_sent` begins another row with what was sent.",
    )
    train: Literal["connected", "quoting", "all"] = Field(
        "connected",
        description="Conversations to train on (docs/agents.md). `connected`: the one with the most requests, and "
        "those connected with it: what the model said in one was sent in the other, or both have the same "
        "instructions and share a message or the task. `quoting`: the instructions may differ, as those of a request "
        "for a title do. `all`: every conversation.",
    )
    ignore: list[Ignorable] = Field(
        [],
        description="Fields of the agent's requests that are taken out instead of refused: the model then samples as "
        "without them, and may call no tool or write no JSON. `response_format` also means `text.format` and "
        "`output_config.format` of the other dialects.",
    )
    failure: Literal["retry"] | float = Field(
        "retry",
        description="What an exception or an exit code other than 0 counts as. `retry`: a failure of the "
        "infrastructure, after which the task is tried again, then skipped; a number: the model's failure, with this "
        "reward.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @field_validator("failure", mode="before")
    @classmethod
    def _is_retry_or_reward(cls, value: Any) -> Any:
        if value == "retry" or (type(value) in (int, float) and math.isfinite(value)):
            return value
        raise ValueError(f"{value!r} is neither retry nor a reward, a finite number")

    @field_validator("environment")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is None or is_tcp(value):
            return value
        raise ValueError(f"{value!r} is not of the form tcp://host:port (port 1 to 65535)")

    @model_validator(mode="after")
    def _runs_one(self) -> Self:
        if sum(one is not None for one in (self.function, self.command, self.environment)) != 1:
            raise ValueError(
                "give either a `function` (module:function), a `command` (a list), or an `environment` (an address)"
            )
        if self.sandbox and self.command is None:
            raise ValueError("sandbox: true needs a `command`: a function or an environment runs outside")
        if self.image is not None and (self.command is None or self.sandbox):
            raise ValueError("image: NAME needs a `command`, and no `sandbox`: the container is one")
        return self

    @property
    def shown(self) -> str:
        """The function's name, the address, or the command as one line; for messages."""
        return self.function or self.environment or " ".join(self.command or ())
