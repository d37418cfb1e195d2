"""Settings of generators: episodes with turns, tools and rewards, the engine that answers, and the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.config.agent import AgentConfig
from common.config.section import Section, SourceSection, local

MAX_CALLS = 32  # calls of one turn that are run; a model could write thousands of short ones
MOST_EPISODES = 512  # limit for a generator that chooses the number itself (`max_concurrency: auto`)
# If a source names tools or a reward of its own, the run's options for the others are dropped.
OPTIONS = {"tools": "tool_options", "reward": "reward_options"}


class EpisodeConfig(SourceSection):
    """Turns, tools and the reward of one episode."""

    section: ClassVar[str] = "episode"
    of_the_run: ClassVar[tuple[str, ...]] = ("rollouts_every",)

    agent: AgentConfig | None = Field(None, description="A program of your own that plays the episodes; null: none.")
    max_assistant_turns: int | None = Field(
        None,
        ge=1,
        description="Assistant turns until the episode ends; null: no limit if tools, a user or an agent answer "
        "them, as in verl; otherwise an episode is one turn.",
    )
    max_user_turns: int | None = Field(
        None, ge=0, description="Turns of tools and of the simulated user until the episode ends; null: no limit."
    )
    max_response_tokens: int = Field(1024, ge=1, description="Tokens after the prompt, tool and user text included.")
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds of wall time after which the episode ends as it is; null: no limit. Generation is cut "
        "off; running tool calls finish first.",
    )
    call_format: str = Field(
        "hermes",
        description="How the model calls tools: `hermes` (JSON in <tool_call> tags), `code` (<code> blocks, answered "
        "by <interpreter> in the same turn), or `module:Class` of your own.",
    )
    calls_in_thinking: bool | None = Field(
        None,
        description="Whether calls between <think> and </think> are run; null: only those of a call format that stops "
        "the turn after a call, as `code` does.",
    )
    tools: list[str] = Field(
        [],
        description="`calculator`, `code_interpreter`, `module:Class` of your own, or the name of an installed one "
        "(docs/extending.md).",
    )
    tool_options: dict[str, dict[str, Any]] = Field(
        {}, description="Arguments of each tool's class, by the tool's name in `tools`."
    )
    tool_timeout: float = Field(
        30.0, gt=0, description="Seconds until a tool call counts as failed and the task is tried again."
    )
    max_tool_text: int = Field(256, ge=1, description="Longer tool results are cut to this number of characters.")
    truncate: Literal["left", "middle", "right"] = Field(
        "middle",
        description="Part of a long tool result that is kept: `left` its head, `right` its tail, `middle` both.",
    )
    user: str | None = Field(
        None,
        description="Simulated user: `corrector`, `scripted`, `llm`, `module:Class` of your own, or the name of an "
        "installed one; null: none.",
    )
    user_options: dict[str, Any] = Field(
        {}, description="Arguments of the user's class. docs/extending.md says what there is."
    )
    turn_rewards: Literal["sum", "last", "mean", "ignore"] = Field(
        "sum",
        description="How a simulated user's rewards for single turns join the final score: their sum, the last one, "
        "their mean or nothing is added to it, and the result is clipped to `sampler.tracker.reward_range`.",
    )
    reward: str | dict[str, float] = Field(
        "exact",
        description="`exact`, `boxed`, `boxed_think`, `math`, `reasoning_gym`, `code`, `format`, `length`, `overlong`, "
        "`judge`, `agent` (the number that the agent gives), `container` (that of the task's tests), or "
        "`module:function` or `module:Class` of your own, or the name of an installed one; or a weighted "
        "sum, {name: weight}. docs/rewards.md says what each is.",
    )
    reward_options: dict[str, dict[str, Any]] = Field(
        {}, description="Arguments of each reward, by its name in `reward`."
    )
    reward_timeout: float = Field(
        30.0, gt=0, description="Seconds until scoring in a process is killed, counts as failed, and is tried again."
    )
    reward_workers: int = local(
        2, ge=1, description="Processes that score, in each generator; up to four times as many while jobs are slow."
    )
    reward_memory_mb: int = local(4096, ge=256, description="Memory of one scoring process in MiB.")
    rollouts_every: int = Field(
        10,
        ge=0,
        description="Keep the episodes dispatched at every n-th version in `rollouts/`, and the learner's data on "
        "their tokens in `training_data/`; 0: none.",
    )

    @property
    def assistant_turns(self) -> int | None:
        """Assistant turns until the episode ends; None if there is no limit."""
        is_answered = bool(self.tools) or self.user is not None or self.agent is not None
        return self.max_assistant_turns if self.max_assistant_turns is not None or is_answered else 1

    @property
    def reward_weights(self) -> dict[str, float]:
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The base's result, without options of tools, rewards and users that the changes replace."""
        merged = super().merged(changes)
        for key, options in OPTIONS.items():
            if key in changes and options not in changes:
                names = changes[key]
                kept = [names] if isinstance(names, str) else names or ()
                merged[options] = {name: value for name, value in merged[options].items() if name in kept}
        if changes.get("user", self.user) != self.user and "user_options" not in changes:
            merged["user_options"] = {}
        return merged


class GeneratorConfig(Section):
    """A vLLM engine and how many episodes it runs at once."""

    max_concurrency: Annotated[int, Field(ge=1)] | Literal["auto"] = local(
        "auto",
        description="Episodes in flight in one process; `auto`: as many as vLLM's cache of keys and values holds "
        "(docs/gpu.md).",
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature of training responses, which are sampled from all tokens, "
        "because a truncated distribution would bias every ratio.",
    )
    max_attempts: int = Field(
        3, ge=1, description="Tries before a task whose engine, tools, user or reward fails is skipped."
    )
    retry_pause: float = Field(
        5.0, ge=0, description="Seconds until a failed task is tried again; doubled after each further failure."
    )
    keep_prefix: Literal["none", "episodes"] = local(
        "none",
        description="What is still read from the prefix cache after a weight update. `none`: nothing; `episodes`: a "
        "later turn reads its own episode's keys and values, computed with older weights (docs/operations.md).",
    )
    logprob_tolerance: float | None = local(
        None,
        gt=0,
        description="Largest mean difference from the learner's log-probs of a fixed prompt that is accepted after a "
        "weight update; null: 0.02 if both compute in float32, else 0.25 (docs/operations.md).",
    )
    check_every: int = local(
        10,
        ge=1,
        description="After the first three updates to trained weights, every how many updates log-probs are compared "
        "with the learner's.",
    )
    tool_parser: str = Field(
        "hermes", description="How the endpoint of agents (`episode.agent`) reads calls: a tool parser of vLLM."
    )
    reasoning_parser: str | None = Field(
        None,
        description="How the endpoint separates a reply's thinking from its text: a reasoning parser of vLLM; "
        "null: it does not.",
    )
    engine: dict[str, Any] = local({}, description="Passed to vLLM's engine arguments untouched.")

    @property
    def most_episodes(self) -> int:
        """Episodes that one process may ever have in flight."""
        return MOST_EPISODES if self.max_concurrency == "auto" else self.max_concurrency


class SandboxConfig(Section):
    """Where model-written code runs."""

    url: str | None = local(
        None, description="A SandboxFusion-compatible server; null: programs run isolated on the generator's machine."
    )
    token: str | None = local(
        None,
        description="Bearer token for the server; null: `SPO_SANDBOX_TOKEN` of the environment, which stays out of the "
        "run's files.",
    )
    token_file: str | None = local(None, description="File with that token, in place of `token`.")
    concurrency: int = local(128, ge=1, description="Programs that one process runs at a time.")
    wait: float = local(60.0, gt=0, description="Seconds that a starting generator waits for its sandbox to answer.")
    memory_mb: int = Field(1024, ge=16, description="Memory of one program in MiB.")
