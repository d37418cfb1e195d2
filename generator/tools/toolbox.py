"""The tools of a run, and how each call is run and answered.

The line between the model's fault and ours, which every reward depends on:

- A call that cannot be read, names no tool or does not fit the tool's schema, an exception in the tool, and a call
  that takes longer than the tool's own `timeout`: the model gets a short error text, and the episode continues.
- `ToolUnavailable`, `SandboxUnavailable`, a session that cannot be opened, and a call that has not ended after
  `episode.tool_timeout`: the infrastructure failed. The exception ends the episode, which is never scored; its task is
  tried again and then skipped.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from jsonschema import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, extend, validator_for

from common.config import EpisodeConfig
from common.config.generator import MAX_CALLS
from common.errors import UserError
from common.log import get_logger
from common.messages import Task
from common.plugins import load_object, make_object
from generator.concurrency import TimedOut, close_all, with_timeout
from generator.formats import ToolCall
from generator.tools.base import ToolError, ToolUnavailable
from generator.tools.calculator import Calculator
from generator.tools.code_interpreter import CodeInterpreter
from sandbox_client import SandboxUnavailable

BUILTIN: dict[str, Any] = {"calculator": Calculator, "code_interpreter": CodeInterpreter}
ENTRY_POINTS = "spo.tools"  # group of entry points for tools of installed packages
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolResult(NamedTuple):
    """The text that the model gets back; `failed` marks an error text of ours."""

    text: str
    failed: bool = False


class Toolbox:
    """The tools of a run, by name.

    Args:
        config: which tools, with which arguments and limits.
        provided: {parameter: function}. A tool whose constructor has the parameter gets the function's result, unless
            `tool_options` sets it.

    Raises:
        UserError: a tool cannot be found or made, or lacks the interface of a tool.
    """

    def __init__(self, config: EpisodeConfig, provided: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self.tools: dict[str, Any] = {}
        self._config = config
        self._validators: dict[str, Validator] = {}
        self._logged: set[tuple[str, type]] = set()
        for entry in config.tools:
            tool = self._make(entry, config.tool_options.get(entry, {}), provided or {})
            _check(entry, tool, config.tool_timeout)
            if tool.name in self.tools:
                raise UserError(f"episode.tools = {config.tools!r} has two tools named {tool.name!r}")
            self.tools[tool.name] = tool
            self._validators[tool.name] = make_validator(tool.schema)

    def schemas(self) -> list[dict[str, Any]]:
        """Function schemas for the chat template."""
        tools = self.tools.values()
        functions = [{"name": tool.name, "description": tool.description, "parameters": tool.schema} for tool in tools]
        return [{"type": "function", "function": function} for function in functions]

    def checked(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Check a turn's calls; those that cannot be run get an error. Takes time if arguments are large."""
        checked = [self._checked(call) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            checked.append(ToolCall("", error=f"error: a turn may have {MAX_CALLS} calls; the others were not run"))
        return checked

    def _checked(self, call: ToolCall) -> ToolCall:
        if call.error:
            return call
        if call.name not in self.tools:
            there_is = ", ".join(self.tools) or "none"
            return ToolCall("", error=f"error: no tool named {call.name[:40]!r}; there is {there_is}")
        try:
            problem: ValidationError | None = next(self._validators[call.name].iter_errors(call.arguments), None)
        except RecursionError:
            return ToolCall(call.name, error="error: wrong arguments: too deeply nested")
        except OverflowError:  # JSON's numbers have no limit; those of `multipleOf` do
            return ToolCall(call.name, error="error: wrong arguments: a number is too large")
        if problem is None:
            return call
        where = "".join(f"{part}: " for part in problem.path)
        return ToolCall(call.name, error=f"error: wrong arguments: {where[:60]}{problem.message[:150]}")

    async def result(self, call: ToolCall, session: Any) -> ToolResult:
        """Run one checked call; raises only failures of the infrastructure, as this module defines them."""
        tool = self.tools[call.name]
        own = getattr(tool, "timeout", None)
        seconds = self._config.tool_timeout if own is None else own
        try:
            text = str(await with_timeout(seconds, session.call(**call.arguments)))
        except (ToolUnavailable, SandboxUnavailable):
            raise
        except ToolError as error:
            return self.shown(str(error), failed=True)
        except TimedOut:
            if own is None:
                raise _no_end(tool, self._config.tool_timeout) from None
            return self.shown(f"error: no result within {own:g} s", failed=True)
        except Exception as error:
            self._log_once(call.name, error)
            return self.shown(f"error: {in_short(error)}", failed=True)
        return self.shown(text)

    async def opened(self, name: str, task: Task) -> Any:
        """Open a session of one tool; raises whatever goes wrong, since that is not the model's fault."""
        tool = self.tools[name]
        if not hasattr(tool, "open"):
            return tool
        try:
            return await with_timeout(self._config.tool_timeout, tool.open(task.model_copy(deep=True)))
        except TimedOut:
            raise _no_end(tool, self._config.tool_timeout) from None

    def shown(self, text: str, failed: bool = False) -> ToolResult:
        return ToolResult(encodable(truncated(text, self._config.max_tool_text, self._config.truncate)), failed)

    def _make(self, entry: str, options: dict[str, Any], provided: Mapping[str, Callable[[], Any]]) -> Any:
        kind = load_object(entry, BUILTIN, "episode.tools", ENTRY_POINTS)
        if not isinstance(kind, type):
            raise UserError(f"episode.tools = {entry!r} is not a class")
        try:
            parameters: Collection[str] = inspect.signature(kind).parameters
        except ValueError:  # it is written in C
            parameters = ()
        fixed = {name: give() for name, give in provided.items() if name in parameters and name not in options}
        return make_object(kind, options, f"episode.tool_options of {entry!r}", fixed)

    def _log_once(self, name: str, error: Exception) -> None:
        """Log the first exception of a kind only: a model can cause as many as it likes."""
        if (name, type(error)) not in self._logged:
            self._logged.add((name, type(error)))
            get_logger().warning("a tool raised; such errors are logged only once", tool=name, error=repr(error))


class EpisodeTools:
    """The tools during one episode. Those with state are opened when first called, and closed with the episode."""

    def __init__(self, toolbox: Toolbox, task: Task) -> None:
        self._toolbox, self._task = toolbox, task
        self._open: dict[str, Any] = {}

    async def run(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Run the checked calls of one turn concurrently; results in call order.

        Raises:
            ToolUnavailable, SandboxUnavailable, Exception: the infrastructure failed; the other calls are cancelled.
        """
        for call in calls:
            if not call.error and call.name not in self._open:
                self._open[call.name] = await self._toolbox.opened(call.name, self._task)
        if len(calls) == 1:
            return [await self._one(calls[0])]
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._one(call)) for call in calls]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in running]

    async def close(self) -> None:
        """Close all opened sessions, even if this is cancelled; failures are logged."""
        opened = {name: session for name, session in self._open.items() if session is not self._toolbox.tools[name]}
        self._open = {}
        await close_all({f"tool {name}": one.close for name, one in opened.items() if hasattr(one, "close")})

    async def _one(self, call: ToolCall) -> ToolResult:
        if call.error:
            return self._toolbox.shown(call.error, failed=True)
        return await self._toolbox.result(call, self._open[call.name])


def _no_end(tool: Any, seconds: float) -> ToolUnavailable:
    """The exception for a call that does not end."""
    waits_for = f", waiting for {tool.waits_for}" if hasattr(tool, "waits_for") else ""
    return ToolUnavailable(f"tool {tool.name}: no end within episode.tool_timeout = {seconds:g} s{waits_for}")


def _check(entry: str, tool: Any, tool_timeout: float) -> None:
    """Raise `UserError` if a tool lacks something or its limits contradict the run's."""
    field = f"episode.tools = {entry!r}"
    if not isinstance(getattr(tool, "name", None), str) or not NAME.fullmatch(tool.name):
        raise UserError(f"{field}: `name` must be 1 to 64 letters, digits, _ or -, got {getattr(tool, 'name', None)!r}")
    if not isinstance(getattr(tool, "description", None), str) or not isinstance(getattr(tool, "schema", None), dict):
        raise UserError(f"{field} needs a `description` (text) and a `schema` (a JSON schema as a dict)")
    try:
        validator_for(tool.schema, default=Draft202012Validator).check_schema(tool.schema)
    except SchemaError as error:
        raise UserError(f"{field}: its schema is not a JSON schema: {error.message[:200]}") from None
    main = getattr(tool, "open", None) or getattr(tool, "call", None)
    if not inspect.iscoroutinefunction(main):
        raise UserError(f"{field} needs `async def call(self, **arguments)`, or `async def open(self, task)`")
    # A tool that runs programs has its limit in `run_timeout`, at which the sandbox ends a program.
    own = getattr(tool, "run_timeout", getattr(tool, "timeout", None))
    if own is not None and not (isinstance(own, int | float) and own > 0):
        raise UserError(f"{field}: its own limit must be a positive number of seconds or None, got {own!r}")
    if own is not None and own >= tool_timeout:
        raise UserError(
            f"{field}: its own limit of {own:g} s is never reached within episode.tool_timeout = {tool_timeout:g} s; "
            "lower the one or raise the other"
        )


def make_validator(schema: dict[str, Any]) -> Validator:
    """A validator that takes time linear in the arguments, as far as the schema's patterns do."""
    kind = validator_for(schema, default=Draft202012Validator)
    # The library's own check compares every pair of objects, which takes minutes for a list that fits in one call.
    made: Validator = extend(kind, {"uniqueItems": _unique})(schema)
    return made


def _unique(validator: Validator, unique: bool, items: Any, schema: Any) -> Iterator[ValidationError]:
    if not unique or not validator.is_type(items, "array"):
        return
    seen = set()
    for item in items:
        key = _key(item)
        if key in seen:
            yield ValidationError(f"{items!r} has non-unique elements")
            return
        seen.add(key)


def _key(value: Any) -> Hashable:
    """A key that is the same for values which JSON Schema considers equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, dict):
        return frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(_key(item) for item in value)
    return (bool, value) if isinstance(value, bool) else value


MARK = "(truncated)"


def truncated(text: str, limit: int, keep: Literal["left", "middle", "right"]) -> str:
    """At most `limit` characters of a text, with a mark where some are missing."""
    if len(text) <= limit:
        return text
    if keep == "left":
        return f"{text[:limit]}...{MARK}"
    if keep == "right":
        return f"{MARK}...{text[len(text) - limit :]}"
    head = limit // 2
    return f"{text[:head]}...{MARK}...{text[len(text) - limit + head :]}"


def encodable(text: str) -> str:
    """The text with `?` for unpaired surrogates, which tokenizers and messages cannot encode."""
    return text.encode("utf-8", "replace").decode()


def in_short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}"[:200].split()).rstrip(":")
