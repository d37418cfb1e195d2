"""Settings of a teacher, which scores the policy's samples: a stronger model, or the policy with more context."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any, ClassVar, Literal

from pydantic import Field

from common.config.section import SourceSection, local

# The keys that name a teacher; at most one of them is set.
TEACHER_KEYS = ("model", "url", "context")


def context_pieces(context: str) -> list[tuple[str, str]]:
    """The texts of `teacher.context`, each with the name of the field that follows it; "" after the last.

    Braces that are text are doubled, as in Python's formatting.

    Raises:
        ValueError: a brace is unpaired, or a field has no name or has options.
    """
    pieces = []
    for text, name, options, conversion in Formatter().parse(context):
        if name == "":
            raise ValueError("a field has no name between its braces")
        if options or conversion:
            raise ValueError(f"the field {name!r} has options; give its name alone")
        pieces.append((text, name or ""))
    return pieces


class TeacherConfig(SourceSection):
    """The model that scores the tokens of finished episodes, and how the learner uses the scores (docs/teacher.md).

    There is a teacher if one of `model`, `url` and `context` is set.
    """

    section: ClassVar[str] = "teacher"
    # The learner does not know the source of a sample.
    of_the_run: ClassVar[tuple[str, ...]] = ("top_k", "form", "weight", "decay_steps", "reward")

    model: str | None = Field(
        None, description="Model folder or Hugging Face name of a teacher that `spo run` serves with vLLM."
    )
    url: str | None = local(
        None,
        description="Or the address, up to `/v1`, of an OpenAI-compatible server that returns the log-probs of a "
        "prompt's tokens, as vLLM's own does.",
    )
    url_model: str | None = Field(None, description="Name of the model at `url`; null: the first that it serves.")
    api_key_env: str | None = local(None, description="Environment variable with the key for `url`.")
    context: str | None = Field(
        None,
        description="Or text added to the prompt, with which the policy is its own teacher; it may have the fields "
        "`{answer}`, `{feedback}` and `{COLUMN}` of the row.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type in which `model` computes; null: `model.dtype`."
    )
    engine: dict[str, Any] = local({}, description="Passed to vLLM's engine arguments for `model` untouched.")
    max_concurrency: int = local(64, ge=1, description="Concurrent requests of one generator to a teacher's server.")
    top_k: int = Field(
        0,
        ge=0,
        le=256,
        description="Compare policy and teacher on the teacher's k likeliest tokens and all others together; 0: only "
        "on the sampled token.",
    )
    form: Literal["advantage", "loss"] = Field(
        "advantage",
        description="The reverse KL of each token becomes a part of its advantage (only with `top_k: 0`), or of the "
        "loss.",
    )
    weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="Weight of the reverse KL.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps over which the weight falls linearly to 0; null: it is constant."
    )
    reward: bool = Field(True, description="Learn from the reward's advantage too; false: from the teacher alone.")

    @property
    def is_set(self) -> bool:
        return any(getattr(self, key) is not None for key in TEACHER_KEYS)

    @property
    def has_server(self) -> bool:
        """Whether a server scores; otherwise the generator's own engine does, or there is no teacher."""
        return self.model is not None or self.url is not None

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The base's result; a teacher that the changes name replaces the section's."""
        others = dict.fromkeys(TEACHER_KEYS) if any(key in changes for key in TEACHER_KEYS) else {}
        return super().merged({**others, **changes})
