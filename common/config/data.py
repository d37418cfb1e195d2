"""Where prompts come from: one data set, or several with weights, some of them known by name (docs/data.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from common.config.former_keys import idle
from common.config.section import Section
from common.errors import UserError, nearest

FILES = (".jsonl", ".parquet")
NOT_READ = (".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".arrow", ".xlsx")  # refused with a hint
HARBOR = "harbor:"  # before the folder of Harbor's tasks
CONTINUE = "continue_final_message"  # the template option by which the model continues an assistant's message
# Arguments of the chat template that SPO sets itself: neither data nor an agent's requests may set them.
DECIDED_VARIABLES = {
    "add_generation_prompt", "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "markup", "prompt", "system", "before", "self", "options",
}  # fmt: skip
Side = Literal["train", "heldout"]
SIDES: tuple[Side, ...] = ("train", "heldout")
SPLITS: dict[Side, str] = {"train": "train", "heldout": "test"}  # default splits of a Hugging Face dataset


@dataclass(frozen=True, slots=True)
class KnownSet:
    """Where a data set is on the Hugging Face hub, and how its rows are read."""

    path: str  # its name there
    prompt_column: str
    answer_column: str
    config: str | None = None  # its configuration, `load_dataset`'s second argument
    train_split: str = "train"
    heldout_split: str = "train"
    answer_after: str | None = None  # a mark; the answer is the text after its last occurrence

    @property
    def splits(self) -> dict[Side, str]:
        return {"train": self.train_split, "heldout": self.heldout_split}


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


# Tasks of Harbor: the answer is the folder of their tests (`sampler.prompts.harbor`).
HARBOR_TASKS = KnownSet("", "prompt", "answer")


def nearest_set(name: str) -> str | None:
    """The known name that is nearest to an unknown one; None if none is near."""
    return nearest(name.lower(), KNOWN_SETS, 0.7)


def misspelt_set(path: str) -> str | None:
    """The known name that a path was probably meant to be; None for files, folders and names like `owner/name`."""
    if path in KNOWN_SETS or "/" in path or "." in path or ":" in path or os.path.exists(path):
        return None
    return nearest_set(path)


def matching_files(path: str | Sequence[str]) -> list[str]:
    """The files that a pattern (`*`, `?`, `[`) matches, sorted; any other path as it is; of a list, those of all items.

    Raises:
        UserError: one of them matches nothing.
    """
    if not isinstance(path, str):
        return [file for one in path for file in matching_files(one)]
    if not is_pattern(path):
        return [path]
    files = sorted(glob(path, recursive=True))
    if not files:
        raise UserError(f"no file matches {path!r}; give a path that exists, or another pattern")
    return files


def is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[") and not os.path.exists(path)


def harbor_folder(path: str) -> Path:
    """The folder of `harbor:FOLDER`, absolute; raises `UserError` for the `~` of an account that does not exist."""
    try:
        return Path(path.removeprefix(HARBOR)).expanduser().absolute()
    except RuntimeError as error:
        raise UserError(f"data {path}: the folder cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Source:
    """A data set to read, with all of its settings resolved."""

    key: str  # its place in the configuration, for messages: `data.train`, or `data.train[NAME]`
    name: str  # its name in tasks and metrics
    path: str | tuple[str, ...]  # if a tuple, several files that are read as one
    split: str
    config: str | None
    options: Mapping[str, Any]
    weight: float  # its share of the training tasks, relative to the other sources'
    prompt_column: str
    answer_column: str | None  # None if the rows have no answers
    id_column: str | None
    answer_after: str | None  # the answer is the text after the last such mark; if None, the whole column
    system_prompt: str | None
    prompt_markup: bool
    template_options: Mapping[str, Any]
    episode: Mapping[str, Any]  # keys of this section that differ for its tasks
    teacher: Mapping[str, Any]  # keys of this section that differ for its tasks

    def shown(self) -> str:
        """The path, and the configuration and split of a dataset; for messages."""
        if not isinstance(self.path, str):
            return ", ".join(self.path)
        if Path(self.path).suffix in FILES or self.options or is_pattern(self.path):
            return self.path
        return f"{self.path} ({self.split})" if self.config is None else f"{self.path} ({self.config}, {self.split})"


def _check_template_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    for name in options or ():
        if name in DECIDED_VARIABLES:
            raise ValueError(f"{name!r} is set by SPO itself; give variables that the chat template reads")
    return options


class DataSource(Section):
    """One of several data sets, as an item of the list `data.train` or `data.heldout`.

    It may also have any key of `data` from `config` to `template_options`. One that is null takes its value from the
    set, if that is known by name, or else from the section `data`.
    """

    path: str | tuple[str, ...] = Field(
        ...,
        description="`*.jsonl`, `*.parquet`, a pattern or a list of such files, a Hugging Face dataset, a set known by "
        "name (docs/data.md), or `harbor:FOLDER` (docs/containers.md).",
    )
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Its name in metrics, prompt ids and tasks; null: the last part of `path`.",
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Its share of the training tasks, relative to the other sources'."
    )
    split: str | None = Field(
        None,
        description="Split of a Hugging Face dataset; null: that of the set known by name, or else `train` for "
        "`data.train` and `test` for `data.heldout`.",
    )
    format: str | None = Field(
        None, description="A set known by name that has the same columns and answers: for a local copy of it."
    )
    episode: dict[str, Any] = Field(
        {},
        description="Keys of the section `episode` that differ for this source's tasks: tools, reward, user, limits. "
        "Each replaces the whole value of the run.",
    )
    teacher: dict[str, Any] = Field(
        {}, description="Keys of the section `teacher` that differ for this source's tasks; `{model: null}`: none."
    )
    # Keys of the section `data`, where they are described.
    config: str | None = None
    options: dict[str, Any] | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    answer_after: str | None = Field(None, min_length=1)
    id_column: str | None = None
    system_prompt: str | None = None
    prompt_markup: bool | None = None
    template_options: dict[str, Any] | None = None

    _options = field_validator("template_options")(_check_template_options)

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is None or name in KNOWN_SETS:
            return name
        near = nearest_set(name)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(KNOWN_SETS)}"
        raise ValueError(f"{name!r} is not a set that is known by name; {hint}")


def _form(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return "path"
    return "files" if value and all(isinstance(item, str) for item in value) else "list"


Sources = Annotated[
    Annotated[str, Tag("path")]
    | Annotated[tuple[str, ...], Tag("files")]
    | Annotated[list[DataSource], Tag("list"), Field(min_length=1)],
    Discriminator(_form),
]


def _with_split(source: Any, split: str) -> Any:
    """An unchecked source with a split added, unless it has one or is a set known by name."""
    # `in list(...)`, because a path may be a list of files, which cannot be hashed.
    if not isinstance(source, Mapping) or source.get("path") in list(KNOWN_SETS):
        return source
    return {"split": split, **{name: value for name, value in source.items() if name != "split" or value is not None}}


class DataConfig(Section):
    """Where prompts come from: one data set, or a list of them, each with keys of its own (docs/data.md)."""

    train: Sources = Field(
        ...,
        description="Training prompts: `*.jsonl`, `*.parquet`, a pattern or a list of such files, a Hugging Face "
        "dataset, or a set known by name; or a list of sources.",
    )
    heldout: Sources | None = Field(None, description="Held-out prompts, for evaluation only, in the same forms.")
    config: str | None = Field(
        None, description="Configuration of a Hugging Face dataset, `load_dataset`'s second argument."
    )
    options: dict[str, Any] = Field({}, description="Options of generated rows, such as those of `reasoning_gym:NAME`.")
    prompt_column: str = Field("prompt", description="Column with the prompt: text, or a list of chat messages.")
    answer_column: str | None = Field(
        "answer", description="Column with the reference answer; null: there are no answers, and no reward needs them."
    )
    answer_after: str | None = Field(
        None, min_length=1, description="The answer is the text after the last such mark in its column, e.g. `####`."
    )
    id_column: str | None = Field(None, description="Column with a unique id; by default a hash of the prompt.")
    system_prompt: str | None = Field(None, description="System message put before prompts that are plain text.")
    prompt_markup: bool = Field(
        False, description="Whether markup in prompts (`<|im_end|>`, `<think>`) is read as markup; false: as text."
    )
    template_options: dict[str, Any] = Field(
        {},
        description="Variables of the chat template, e.g. `{enable_thinking: false}`; with `continue_final_message: "
        "true` the model continues a prompt's last message if that is the assistant's.",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are skipped and counted.")

    _options = field_validator("template_options")(_check_template_options)

    @classmethod
    def read_former(cls, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """Turn the former keys `train_split` and `heldout_split` of this section into the `split` of each source."""
        fields, notes = dict(data), list[str]()
        for side, default in SPLITS.items():
            name = f"{side}_split"
            if (value := fields.pop(name, None)) is None:
                continue
            if value == default or fields.get(side) is None:
                notes += idle({name: value})
                continue
            sources = fields[side] if _form(fields[side]) == "list" else [{"path": fields[side]}]
            fields[side] = [_with_split(source, value) for source in sources]
            notes.append(f"{name} = {value!r} is an older name; say {side}=[{{path: PATH, split: {value!r}}}]")
        return fields, notes

    @property
    def template_variables(self) -> dict[str, Any]:
        """The template options that are variables of the template."""
        return {name: value for name, value in self.template_options.items() if name != CONTINUE}

    def all_sources(self) -> list[Source]:
        return [source for side in SIDES for source in self.sources(side)]

    def sources(self, side: Side) -> list[Source]:
        """The data sets to train on, or to evaluate on; empty if there is no held-out data."""
        value = self.train if side == "train" else self.heldout
        if value is None:
            return []
        if isinstance(value, str | tuple):
            return [self._resolved(DataSource(path=value), side, f"data.{side}")]
        return [self._resolved(item, side, f"data.{side}[{source_name(item)}]") for item in value]

    def _resolved(self, item: DataSource, side: Side, key: str) -> Source:
        """Each key from the item, else from the set known by name, else from this section."""
        path = item.path if isinstance(item.path, str) else ""
        is_harbor = path.startswith(HARBOR)
        known_set = HARBOR_TASKS if is_harbor else KNOWN_SETS.get(path)
        place: KnownSet | DataConfig = known_set or self
        rows: KnownSet | DataConfig = known_set or KNOWN_SETS.get(item.format or "") or self
        return Source(
            key=key,
            name=source_name(item),
            path=(known_set.path if known_set else "") or item.path,
            split=item.split or (known_set.splits if known_set else SPLITS)[side],
            config=item.config or place.config,
            options=self.options if item.options is None else item.options,
            weight=item.weight,
            prompt_column=item.prompt_column or rows.prompt_column,
            answer_column=item.answer_column or rows.answer_column,
            id_column=item.id_column or (self.id_column if rows is self else "task" if is_harbor else None),
            answer_after=item.answer_after or rows.answer_after,
            system_prompt=self.system_prompt if item.system_prompt is None else item.system_prompt,
            prompt_markup=self.prompt_markup if item.prompt_markup is None else item.prompt_markup,
            template_options=self.template_options if item.template_options is None else item.template_options,
            episode=item.episode,
            teacher=item.teacher,
        )


def source_name(item: DataSource) -> str:
    """The source's own name, or the last part of its path without the ending of a file."""
    if item.name is not None:
        return item.name
    path = item.path if isinstance(item.path, str) else next(iter(item.path), "")
    *folders, last = re.split(r"[/:]", path.rstrip("/"))
    if Path(last).suffix in FILES:
        last = Path(last).stem
    if is_pattern(path):
        # The part that all names share: `part-*.parquet` is `part`, and `maths/*.parquet` is `maths`.
        last = re.split(r"[*?[]", last)[0].rstrip("._-") or (folders or [""])[-1]
    return re.sub(r"[^A-Za-z0-9._-]", "-", last) or "data"
