"""The base class of the configuration's sections, and messages about wrong values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from common.config.former_keys import without_gone
from common.config.names_elsewhere import ELSEWHERE
from common.errors import UserError, nearest
from common.network import without_password

SECRETS = ("sandbox.token",)  # messages do not show their values
# Names of the forms of `data.train`; pydantic inserts them into the locations of errors.
FORMS = ("path", "files", "list")


# For text that may be `on` or `off`, which YAML reads as true and false.
ON_OFF = BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value)
# For text such as `0,2`, because YAML reads a single `0` as a number.
NUMBERS_AS_TEXT = BeforeValidator(
    lambda value: str(value) if isinstance(value, int) and not isinstance(value, bool) else value
)


def local(default: Any, **options: Any) -> Any:
    """A pydantic `Field` that describes the machine a process runs on: processes of one run may differ in it."""
    return Field(default, json_schema_extra={"local": True}, **options)


class Section(BaseModel):
    """A section, in which unknown keys are errors and values cannot be changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    _notes: list[str] = PrivateAttr([])  # a line for each former key or name that was read

    @classmethod
    def read_former(cls, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """The section's values under today's keys, and the notes.

        Raises:
            ValueError: a former key is given beside today's, or has a value without a meaning today.
        """
        return without_gone(cls.__name__, data)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Replace former keys and names, before anything else looks at them."""
        if not isinstance(data, Mapping):
            return handler(data)
        fields, notes = cls.read_former(data)
        section = handler(fields)
        section._notes = notes
        return section


class SourceSection(Section):
    """A section that a source of the data may override in part."""

    section: ClassVar[str]  # its key in the configuration
    of_the_run: ClassVar[tuple[str, ...]]  # keys that are the same for all sources

    def with_changes(self, changes: Mapping[str, Any], source: str) -> Self:
        """The section with a source's changes; raises `UserError`, with the source's key, if one of them is wrong."""
        if not changes:
            return self
        name = f"{source}.{self.section}"
        for key in self.of_the_run:
            if key in changes:
                raise UserError(f"{name}.{key} cannot be set for one source; set {self.section}.{key}, for all")
        merged = self.merged(changes)
        try:
            return type(self).model_validate(merged)
        except ValidationError as error:
            raise UserError(explain(error, merged, type(self), name)) from None

    def merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The section's values, replaced by `changes` where these have a value."""
        return {**self.model_dump(), **changes}


def explain(error: ValidationError, tree: Mapping[str, Any], model: type[BaseModel], name: str = "") -> str:
    """All problems of a section as one line: which key, what was given, what is allowed.

    Args:
        tree: the mapping that `model` refused.
        name: of the section; empty for the whole configuration.
    """
    problems: dict[tuple[str | int, ...], list[Any]] = {}
    for problem in error.errors():
        problems.setdefault(tuple(_without_forms(problem["loc"], tree, model)), []).append(problem)
    # If a value may have several forms, a problem inside it says more than that it has none of the other forms.
    inner = {place[:depth] for place in problems for depth in range(len(place))}
    return "; ".join(
        _explain([*place], tree, model, name, *problems[place]) for place in problems if place not in inner
    )


def _explain(
    location: list[str | int], tree: Mapping[str, Any], model: type[BaseModel], name: str, problem: Any, *others: Any
) -> str:
    """One line on a key; `others` are problems of the same value, one for each other form that it may have."""
    key = _join(name, _named(location, tree))
    if problem["type"] == "extra_forbidden":
        siblings, value = _keys_at(model, location[:-1]), problem["input"]
        # Another trainer's section may be spelt nearly like one of ours, so a section needs a closer match.
        hint = _meant(key, siblings, model, 0.8 if isinstance(value, Mapping) else 0.5) or _meant_within(value, model)
        is_outside = not name and len(location) == 1
        if is_outside and "." in hint and hint.endswith("?") and not isinstance(value, Mapping):
            hint += " Indent it below its section"
        allowed = f"allowed: {', '.join(siblings)}"
        return f"unknown configuration key {key}; {hint or allowed}"
    if problem["type"] == "missing":
        return f"configuration key {key} is missing"
    if problem["type"] == "value_error":
        # Our own checks name the field and the value themselves.
        return f"configuration key {key}: {problem['ctx']['error']}"
    value = problem["input"]
    if problem["type"] == "model_type":
        keys = _keys_at(model, location)
        preset = f" (for a preset: {key}.preset={value})" if "preset" in keys else ""
        return f"{key} = {value!r} is a section, not a value; give one of its keys: {', '.join(keys)}{preset}"
    shown = "***" if key in SECRETS else without_password(repr(value))
    wrong = [problem["msg"], *(other["msg"].removeprefix("Input should be ") for other in others)]
    return f"configuration key {key} = {shown}: {wrong[0][0].lower()}{', or '.join(wrong)[1:]}"


def _meant(key: str, siblings: Collection[str], model: type[BaseModel], cutoff: float = 0.5) -> str:
    """A hint at the key that was meant: another trainer's name for it, the key of another section, or a similar key."""
    before, _, last = key.rpartition(".")
    today = ELSEWHERE.get(key) or ELSEWHERE.get(last, "")
    if (own := today.rpartition(".")[2]) in siblings:
        return f"did you mean {_join(before, own)}?"
    if today:
        return today if " " in today else f"did you mean {today}?"
    if inside := [one for one in keys_of(model) if one.endswith(f".{last}")]:
        return f"did you mean {' or '.join(inside)}?"
    near = nearest(last, siblings, cutoff)
    return f"did you mean {_join(before, near)}?" if near else ""


def _meant_within(value: Any, model: type[BaseModel]) -> str:
    """Hints for the keys inside an unknown section, such as verl's `actor_rollout_ref`."""
    inner = value.items() if isinstance(value, Mapping) else ()
    hints = {key: _meant(str(key), (), model) or _meant_within(value, model) for key, value in inner}
    return "; ".join(f"{key}: {hint}" for key, hint in hints.items() if hint)


def _without_forms(location: Iterable[str | int], tree: Any, model: type[BaseModel]) -> Iterator[str | int]:
    """The location of an error without the names that pydantic inserts if a value may have several forms."""
    before: str | int = ""
    section: Any = model
    for part in location:
        is_named_form = part in FORMS and before in ("train", "heldout")
        if not is_named_form and (section is not None or _within(tree, part) is not None):
            yield part
            tree = _within(tree, part)
            if isinstance(part, str) and section is not None:
                field = next(
                    (field for name, field in section.model_fields.items() if part in (name, field.alias)), None
                )
                section = field and section_of(field.annotation)
        before = part


def _within(tree: Any, part: str | int) -> Any:
    try:
        return tree[part]
    except (LookupError, TypeError):
        return None


def _named(location: Iterable[str | int], tree: Any) -> str:
    """A path as a user writes it; an item of a list by its name or path, if it has one, else by its position."""
    text = ""
    for part in location:
        tree = _within(tree, part)
        if isinstance(part, int):
            name = (tree.get("name") or tree.get("path")) if isinstance(tree, Mapping) else None
            text += f"[{name if isinstance(name, str) else part}]"
        else:
            text = _join(text, part)
    return text


def _join(before: str, key: str) -> str:
    return f"{before}.{key}" if before and key else before or key


def _keys_at(model: Any, location: Iterable[str | int]) -> list[str]:
    """The keys allowed in a section."""
    for part in location:
        if isinstance(part, str):
            field = next(field for name, field in model.model_fields.items() if part in (name, field.alias))
            model = section_of(field.annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def keys_of(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """The keys of values in a section and in the sections within it; a list of sections is one value."""
    for name, field in model.model_fields.items():
        key, options = _join(before, field.alias or name), (field.annotation, *get_args(field.annotation))
        section = next((option for option in options if hasattr(option, "model_fields")), None)
        if section is None:
            yield key
        else:
            yield from keys_of(section, key)


def notes_of(section: Section, before: str = "") -> Iterator[str]:
    """The notes of a section and of the sections within it, each preceded by the key of its section."""
    yield from (_join(before, note) for note in section._notes)
    for name in type(section).model_fields:
        value = getattr(section, name)
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, Section):
                yield from notes_of(one, _join(before, name))


def section_of(annotation: Any) -> Any:
    """The section that an annotation names, also as an optional value or a list's item; None if there is none."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((section for option in get_args(annotation) if (section := section_of(option))), None)
