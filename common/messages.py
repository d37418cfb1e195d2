"""The messages on the streams: pydantic models, sent as msgpack maps with a schema version.

msgpack, never pickle: a message can carry data only. Bytes that do not fit the model raise `InvalidMessage`, and the
receiver moves them to the dead letters instead of stopping. Every number has bounds, so that nothing computed from it
overflows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from common.unpack import MAX_VALUES, Unreadable, unpack

SCHEMA: Final = 1
MAX_RECORD: Final = 1 << 21  # bytes

MAX_TURNS: Final = 1 << 14  # of the assistant in one episode
MAX_PARTS: Final = 256  # of a reward

Kind = Literal["train", "eval", "values"]

# Payloads hold tokens and versions as int32.
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Version = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Reward = Annotated[float, Field(ge=-1e12, le=1e12)]
Drift = Annotated[float, Field(ge=0, le=1e9)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Counts = Annotated[list[Count], Field(fail_fast=True)]
Numbers = Annotated[list[FiniteFloat], Field(fail_fast=True)]
Rewards = Annotated[list[Reward], Field(fail_fast=True)]


class Ending(StrEnum):
    """How an episode ended."""

    STOP = "stop"  # the model ended its turn, called no tool, and no user answers; or the agent ended by itself
    USER = "user"  # the simulated user ended the conversation
    LENGTH = "length"  # no more tokens are allowed, or the next turn does not fit
    MAX_ASSISTANT_TURNS = "max_assistant_turns"  # another turn would follow, and no more are allowed
    MAX_USER_TURNS = "max_user_turns"  # another turn of tools or of the user would follow, and no more are allowed
    MAX_SECONDS = "max_seconds"  # `episode.max_seconds` have passed
    AGENT_FAILED = "agent_failed"  # the agent failed, and `episode.agent.failure` is a reward
    OTHER = "other"  # it has not ended, or a record has a word that is not in this list

    @classmethod
    def _missing_(cls, value: object) -> Ending:
        return cls.OTHER


class Failure(StrEnum):
    """Why a task was skipped. Each kind has a counter, `set_aside.KIND`; the reason beside it is text for people."""

    PROMPT_TOO_LONG = "PromptTooLong"
    PROMPT_NOT_SEEN = "PromptNotSeen"
    UNKNOWN_SOURCE = "UnknownSource"
    ENGINE_FAILED = "EngineFailed"
    TOOL_UNAVAILABLE = "ToolUnavailable"
    SANDBOX_UNAVAILABLE = "SandboxUnavailable"
    BAD_USER_TURN = "BadUserTurn"
    CHAT_UNAVAILABLE = "ChatUnavailable"
    AGENT_FAILED = "AgentFailed"
    ENDPOINT_FAILED = "EndpointFailed"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    CONTAINER_FAILED = "ContainerFailed"
    REWARD_FAILED = "RewardFailed"
    OUT_OF_RANGE = "OutOfRange"
    WORKER_DIED = "WorkerDied"
    NO_VERDICT = "NoVerdict"
    TEACHER_FAILED = "TeacherFailed"
    TIMED_OUT = "TimeoutError"
    CANCELLED = "Cancelled"
    GENERATORS_LOST = "GeneratorsLost"
    INVALID_MESSAGE = "InvalidMessage"
    INVALID_RESULT = "InvalidResult"
    OTHER = "other"


def failure_of(error: BaseException) -> Failure:
    """The kind of failure that an error's class names; `OTHER` for errors of libraries and of a user's code."""
    failure = getattr(error, "failure", None)
    if isinstance(failure, Failure):
        return failure
    return Failure.TIMED_OUT if isinstance(error, TimeoutError) else Failure.OTHER


class InvalidMessage(Exception):
    """Bytes that are not a message of the expected type; the text says why."""

    failure = Failure.INVALID_MESSAGE


def first_problem(error: ValidationError) -> str:
    """The first problem of a message in one line; if there are very many, only their number."""
    if error.error_count() > 1000:
        return f"{error.error_count()} problems"
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "message"
    return f"{where[:200]}: {first['msg'][:500]}".encode(errors="backslashreplace").decode()


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_values: ClassVar[int] = MAX_VALUES

    # pydantic itself has an attribute `schema`.
    v: Literal[1] = SCHEMA

    def pack(self) -> bytes:
        return msgpack.packb(self.__dict__)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read and check a message; raises `InvalidMessage`."""
        try:
            return cls.model_validate(unpack(data, max_values=cls.max_values))
        except ValidationError as error:
            raise InvalidMessage(f"{cls.__name__}: {first_problem(error)}") from None
        except Unreadable as error:
            raise InvalidMessage(f"{cls.__name__}: {error}") from None


class Task(Message):
    """One prompt to answer once."""

    task_id: str
    prompt_id: str
    kind: Kind = "train"
    source: str = Field("", description="Name of the data source it comes from; empty if there is only one.")
    prompt: str | list[dict[str, Any]]
    answer: Any = None
    row: dict[str, Any] = Field(default_factory=dict, description="Other columns of the data row, for rewards.")
    min_version: Version = Field(0, description="Answer with these weights or newer.")
    evaluation: str = Field("", description="The evaluation it belongs to, which one version of the weights answers.")
    keep: bool = Field(False, description="Send a record of the episode along, tokens included.")
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] | None = Field(
        None, description="Seed for sampling its first turn; each later turn has the next number. None means any."
    )


class SampleHeader(Message):
    """A finished task, for the sampler; the tokens stay under the payload's key."""

    task_id: str
    prompt_id: str
    kind: Kind = "train"
    status: Literal["ok", "set_aside"] = "ok"
    reason: str = Field("", description="Why the episode ended (ok: an `Ending`), or why the task was skipped (text).")
    failure: Annotated[Failure, Field(strict=False)] | None = Field(
        None, description="Why the task was skipped; None if it was not, or if the generator sent no kind."
    )
    reward: Reward = 0.0
    answer: str = Field("", description="The final answer that the reward compared; only in evaluations.")
    reward_parts: dict[str, Reward] = Field(
        default_factory=dict, max_length=MAX_PARTS, description="What the reward is made of, before weights."
    )
    tokens: Count = Field(0, description="Prompt and response.")
    row_tokens: Counts = Field(
        default_factory=list,
        max_length=MAX_TURNS,
        description="Tokens of each row of the sample; empty if it has one row.",
    )
    model_tokens: Count = Field(0, description="Tokens the model sampled.")
    oldest_version: Version = 0
    newest_version: Version = 0
    retire: bool = Field(False, description="The prompt can never be answered: do not select it again.")
    drift: Drift | None = Field(None, description="D of mode `rescore`.")
    generator: str = ""
    turns: Count = 0
    tool_calls: Count = 0
    tool_errors: Count = Field(0, description="Tool calls that were answered with an error text.")
    requests: Count = Field(0, description="Accepted requests of an agent, without retries; 0 without an agent.")
    retries: Count = Field(0, description="Requests that got the reply to an earlier, identical one.")
    refused: Count = Field(0, description="Requests that the endpoint refused, without those beyond a limit.")
    dropped: Count = Field(0, description="Requests without a reply, or whose reply the agent did not read.")
    prompt_tokens: Count = Field(0, description="Prompt tokens of the other requests; each prompt is counted in full.")
    kept_tokens: Count = Field(0, description="Those of them that are the ids of earlier turns.")
    seconds: Seconds = 0.0
    container_seconds: dict[str, Seconds] = Field(
        default_factory=dict, max_length=8, description="How long `start`, `agent` and `grading` of a container took."
    )
    turn_rewards: Rewards = Field(
        default_factory=list, max_length=MAX_TURNS, description="Rewards by a simulated user, turn by turn."
    )
    turn_returns: Rewards = Field(
        default_factory=list,
        max_length=MAX_TURNS,
        description="Reward from each assistant turn on, with `algorithm.turn_advantage: turn`; one per model span.",
    )
    turn_tokens: Counts = Field(
        default_factory=list, max_length=MAX_TURNS, description="Tokens of each of those turns."
    )
    record: bytes | None = Field(
        None, max_length=MAX_RECORD, description="The episode as text (`common.payload`), if it is kept."
    )

    @classmethod
    def skipped(cls, task_id: str, failure: Failure, reason: str, *, prompt_id: str = "", **fields: Any) -> Self:
        """The header of a task that has no answer to count."""
        return cls(task_id=task_id, prompt_id=prompt_id, status="set_aside", failure=failure, reason=reason, **fields)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.oldest_version > self.newest_version:
            raise ValueError(f"oldest_version {self.oldest_version} is above newest_version {self.newest_version}")
        if len(self.turn_returns) != len(self.turn_tokens):
            raise ValueError(f"{len(self.turn_returns)} turn_returns but {len(self.turn_tokens)} turn_tokens")
        if self.row_tokens and (0 in self.row_tokens or sum(self.row_tokens) != self.tokens):
            rows, least, tokens = len(self.row_tokens), min(self.row_tokens), sum(self.row_tokens)
            raise ValueError(f"{rows} rows, the shortest of {least} tokens, have {tokens} of {self.tokens} tokens")
        return self


class Batch(Message):
    """A manifest: which samples to train on, column by column ([B] each).

    `turn_advantages` has a number for each assistant turn of each sample, and replaces `advantages`; None unless
    `algorithm.turn_advantage` is `turn`. `row_tokens` has the number of tokens of each row of each sample, empty for a
    sample of one row; None if all have one. `kept` marks the samples whose episodes are kept
    (`episode.rollouts_every`); None if there are none.

    `values` and `returns` are for a critic, None without `algorithm.baseline: critic` or `both`: the tracker's value of
    each sample's prompt, and its reward (one number) or what followed each of its turns, both rescaled to [0, 1].
    """

    max_values: ClassVar[int] = 1 << 20

    batch_id: Version = Field(..., description="Also the weight version that trains on it.")
    sample_ids: Texts
    advantages: Numbers
    rewards: Rewards
    tokens: Counts
    turn_advantages: Annotated[list[Numbers], Field(fail_fast=True)] | None = None
    row_tokens: Annotated[list[Counts], Field(fail_fast=True)] | None = None
    kept: Annotated[list[bool], Field(fail_fast=True)] | None = None
    values: Numbers | None = None
    returns: Annotated[list[Numbers], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        columns = (getattr(self, name) for name in type(self).model_fields if name not in ("v", "batch_id"))
        sizes = {len(column) for column in columns if column is not None}
        if len(sizes) != 1:
            raise ValueError(f"columns of different lengths: {sorted(sizes)}")
        if (self.values is None) != (self.returns is None):
            raise ValueError("values and returns come together, or not at all")
        if self.returns is not None and not all(self.returns):
            raise ValueError("a sample without returns")
        return self


class Step(Message):
    """The learner has published a version: after a batch, or when it starts."""

    version: Version
    drift: Drift = Field(0.0, description="Mean |log-prob change| per token from the last version to this.")
    metrics: dict[str, float] = Field(
        default_factory=dict, max_length=10_000, description="Empty if no batch was trained on."
    )
    checkpoint: bool = False
