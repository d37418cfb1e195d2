"""Episodes: turns, tools and the reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.config.section import LOCAL, Section


class EpisodeConfig(Section):
    """Turns, tools and the reward of one episode."""

    max_assistant_turns: int = Field(1, ge=1, description="Assistant turns until the episode ends.")
    max_user_turns: int | None = Field(
        None, ge=0, description="Turns of tools and of the simulated user until the episode ends; null: no limit."
    )
    max_response_tokens: int = Field(1024, ge=1, description="Tokens after the prompt, tool and user text included.")
    max_seconds: float | None = Field(
        None,
        gt=0,
        description="Wall time until the episode ends as it stands, in seconds; null: no limit. Generation is cut; "
        "tools under way end first.",
    )
    call_format: str = Field(
        "hermes",
        description="How the model calls tools: `hermes` (JSON in <tool_call> tags), `code` (<code> blocks, answered "
        "by <interpreter> in the same turn), or `module:Class` of your own.",
    )
    tools: list[str] = Field(
        default_factory=list,
        description="`calculator`, `code_interpreter`, `module:Class` of your own, or the name of an installed one "
        "(docs/extending.md).",
    )
    tool_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Arguments of each tool's class, by the tool's name in `tools`."
    )
    tool_timeout: float = Field(
        30.0, gt=0, description="Seconds until a tool call counts as failed machinery (and the task is retried)."
    )
    max_tool_text: int = Field(256, ge=1, description="Longer tool results are cut, in characters.")
    truncate: Literal["left", "middle", "right"] = Field(
        "middle", description="What is kept of a long tool result: `left` its head, `right` its tail, `middle` both."
    )
    user: str | None = Field(
        None,
        description="Simulated user: `corrector`, `scripted`, `llm`, `module:Class` of your own, or the name of an "
        "installed one; null: none.",
    )
    user_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the user's class. docs/extending.md says what there is."
    )
    turn_rewards: Literal["sum", "last", "mean", "ignore"] = Field(
        "sum",
        description="How the rewards a user gave in single turns join the final score: their sum, the last or the mean "
        "is added to it, and the result is clipped to `sampler.tracker.reward_range`.",
    )
    reward: str | dict[str, float] = Field(
        "exact",
        description="`exact`, `boxed`, `boxed_think`, `math`, `reasoning_gym`, `code`, `format`, `length`, `overlong`, "
        "`judge`, or `module:function` or `module:Class` of your own, or the name of an installed one; or a weighted "
        "sum, {name: weight}. docs/rewards.md says what each is.",
    )
    reward_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Arguments of each reward, by its name in `reward`."
    )
    reward_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds until scoring in a process is killed and counts as failed (and is retried).",
    )
    reward_workers: int = Field(
        2,
        ge=1,
        description="Processes that score, in each generator; up to four times as many while jobs are slow.",
        json_schema_extra=LOCAL,
    )
    reward_memory_mb: int = Field(
        4096, ge=256, description="Memory of one scoring process in MiB.", json_schema_extra=LOCAL
    )
    rollouts_every: int = Field(
        10,
        ge=0,
        description="Episodes dispatched at every so many versions are kept under `rollouts/`, and what the learner "
        "knew of their tokens under `training_data/`; 0: none.",
    )
