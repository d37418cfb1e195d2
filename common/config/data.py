"""Where prompts come from: one data set, or several with weights, some of them known by name (docs/data.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from common.config.section import Section
from common.errors import nearest

FILES = (".jsonl", ".parquet")
NOT_READ = (".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".arrow", ".xlsx")  # refused with a hint
Side = Literal["train", "heldout"]
SIDES: tuple[Side, ...] = ("train", "heldout")


@dataclass(frozen=True, slots=True)
class KnownSet:
    """Where a data set is on the Hugging Face hub, and how its rows are read.

    Attributes:
        path: its name there.
        config: its configuration, `load_dataset`'s second argument.
        train_split, heldout_split: the split to train on, and the one to evaluate on.
        answer_after: the answer is what follows the last of these marks.
    """

    path: str
    prompt_column: str
    answer_column: str
    config: str | None = None
    train_split: str = "train"
    heldout_split: str = "train"
    answer_after: str | None = None


KNOWN_SETS: dict[str, KnownSet] = {
    # Prompts are chat messages, with an instruction in them; each problem occurs about a hundred times.
    "dapo-math-17k": KnownSet("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
    # The same problems once each, as text without an instruction; the recipe trains on these.
    "dapo-math-17k-processed": KnownSet(
        "open-r1/DAPO-Math-17k-Processed", "prompt", "reward_model.ground_truth", config="all"
    ),
    "aime24": KnownSet("Maxwell-Jia/AIME_2024", "Problem", "Answer"),
    "aime25": KnownSet("yentinglin/aime_2025", "problem", "answer"),
    "beyondaime": KnownSet(
        "ByteDance-Seed/BeyondAIME", "problem", "answer", train_split="test", heldout_split="test"
    ),
    "brumo25": KnownSet("MathArena/brumo_2025", "problem", "answer"),
    "hmmt25": KnownSet("MathArena/hmmt_feb_2025", "problem", "answer"),
    "gsm8k": KnownSet(
        "openai/gsm8k", "question", "answer", config="main", heldout_split="test", answer_after="####"
    ),
}  # fmt: skip


def nearest_set(name: str) -> str | None:
    """The known name that is nearest to an unknown one; None if none is near."""
    return nearest(name.lower(), KNOWN_SETS, 0.7)


def misspelt_set(path: str) -> str | None:
    """The known name that a path was probably meant to be; None for files, folders and names like `owner/name`."""
    if path in KNOWN_SETS or "/" in path or "." in path or ":" in path or Path(path).exists():
        return None
    return nearest_set(path)


@dataclass(frozen=True, slots=True)
class Source:
    """A data set to read, with all of its settings resolved.

    Attributes:
        key: its place in the configuration, for messages: `data.train`, or `data.train[NAME]`.
        name: its name in tasks and metrics.
        weight: its share of the training tasks, relative to the other sources'.
        answer_after: the answer is what follows the last of these marks; None: all of the column.
        episode, teacher: keys of these sections that differ for its tasks.
    """

    key: str
    name: str
    path: str
    split: str
    config: str | None
    options: Mapping[str, Any]
    weight: float
    prompt_column: str
    answer_column: str
    id_column: str | None
    answer_after: str | None
    system_prompt: str | None
    prompt_markup: bool
    episode: Mapping[str, Any]
    teacher: Mapping[str, Any]

    def shown(self) -> str:
        """The path, and the configuration and split of a dataset; for messages."""
        if Path(self.path).suffix in FILES or self.options:
            return self.path
        return f"{self.path} ({self.split})" if self.config is None else f"{self.path} ({self.config}, {self.split})"


class DataSource(Section):
    """One of several data sets, as an item of the list `data.train` or `data.heldout`.

    A key that is null takes its value from the set, where that is known by name, or else from the section `data`.
    """

    path: str = Field(
        ..., description="`*.jsonl`, `*.parquet`, a Hugging Face dataset, or a set known by name (docs/data.md)."
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Its name in metrics, prompt ids and tasks; null: the last part of `path`.",
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Its share of the training tasks, relative to the other sources'."
    )
    split: str | None = Field(None, description="Split of a Hugging Face dataset.")
    config: str | None = Field(None, description="Configuration of a Hugging Face dataset.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a source whose rows are generated.")
    format: str | None = Field(
        None, description="A set known by name that has the same columns and answers: for a local copy of it."
    )
    prompt_column: str | None = Field(None, description="Column with the prompt.")
    answer_column: str | None = Field(None, description="Column with the reference answer.")
    answer_after: str | None = Field(None, min_length=1, description="The answer is what follows the last such mark.")
    id_column: str | None = Field(None, description="Column with an id that is unique within the source.")
    system_prompt: str | None = Field(None, description="System message put before prompts that are plain text.")
    prompt_markup: bool | None = Field(
        None, description="Markup in prompts (`<|im_end|>`, `<think>`) counts as such; false: it is text."
    )
    episode: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the section `episode` that differ for this source's tasks: tools, reward, user, limits. "
        "Each replaces the run's value as a whole.",
    )
    teacher: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the section `teacher` that differ for this source's tasks; `{model: null}`: none.",
    )

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is None or name in KNOWN_SETS:
            return name
        near = nearest_set(name)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(KNOWN_SETS)}"
        raise ValueError(f"{name!r} is not a set that is known by name; {hint}")


def _form(value: Any) -> str:
    return "list" if isinstance(value, list) else "path"


Sources = Annotated[
    Annotated[str, Tag("path")] | Annotated[list[DataSource], Tag("list"), Field(min_length=1)], Discriminator(_form)
]


class DataConfig(Section):
    """Where prompts come from: one data set, or a list of them, each with keys of its own (docs/data.md)."""

    train: Sources = Field(
        ...,
        description="Training prompts: `*.jsonl`, `*.parquet`, a Hugging Face dataset, or a set known by name; or a "
        "list of sources.",
    )
    heldout: Sources | None = Field(None, description="Held-out prompts, for evaluation only, in the same forms.")
    train_split: str = Field("train", description="Split of a Hugging Face dataset to train on.")
    heldout_split: str = Field("test", description="Split of a Hugging Face dataset to evaluate on.")
    config: str | None = Field(
        None, description="Configuration of a Hugging Face dataset, `load_dataset`'s second argument."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of a source whose rows are generated.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    answer_column: str = Field("answer", description="Column with the reference answer.")
    answer_after: str | None = Field(
        None, min_length=1, description="The answer is what follows the last such mark in its column, e.g. `####`."
    )
    id_column: str | None = Field(None, description="Column with a unique id; by default a hash of the prompt.")
    system_prompt: str | None = Field(None, description="System message put before prompts that are plain text.")
    prompt_markup: bool = Field(
        False, description="Markup in prompts (`<|im_end|>`, `<think>`) counts as such; false: it is text."
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are skipped and counted.")

    def sources(self, side: Side) -> list[Source]:
        """The data sets to train on, or to evaluate on; none where there is no held-out data."""
        value = self.train if side == "train" else self.heldout
        if value is None:
            return []
        if isinstance(value, str):
            return [self._resolved(DataSource(path=value, options=self.options), side, f"data.{side}")]
        return [self._resolved(item, side, f"data.{side}[{source_name(item)}]") for item in value]

    def _resolved(self, item: DataSource, side: Side, key: str) -> Source:
        """Each key from the item, else from the set known by name, else from this section."""
        known_set = KNOWN_SETS.get(item.path)
        place: KnownSet | DataConfig = known_set or self
        rows: KnownSet | DataConfig = known_set or KNOWN_SETS.get(item.format or "") or self
        return Source(
            key=key,
            name=source_name(item),
            path=known_set.path if known_set else item.path,
            split=item.split or (place.train_split if side == "train" else place.heldout_split),
            config=item.config or place.config,
            options=item.options,
            weight=item.weight,
            prompt_column=item.prompt_column or rows.prompt_column,
            answer_column=item.answer_column or rows.answer_column,
            id_column=item.id_column or (self.id_column if rows is self else None),
            answer_after=item.answer_after or rows.answer_after,
            system_prompt=self.system_prompt if item.system_prompt is None else item.system_prompt,
            prompt_markup=self.prompt_markup if item.prompt_markup is None else item.prompt_markup,
            episode=item.episode,
            teacher=item.teacher,
        )


def source_name(item: DataSource) -> str:
    """The source's own name, or the last part of its path without the ending of a file."""
    if item.name is not None:
        return item.name
    last = re.split(r"[/:]", item.path.rstrip("/"))[-1]
    if Path(last).suffix in FILES:
        last = Path(last).stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", last) or "data"
