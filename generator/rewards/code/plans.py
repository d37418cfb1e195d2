"""Reads a program's tests, in the forms that data sets use, as runs or as Python statements."""

from __future__ import annotations

import ast
import json
import keyword
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Statements that prepare a test; passing them proves nothing.
_PREPARATION = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign)
# What the parsers of Python and of JSON raise; a literal such as {[1]: 2} is a `TypeError`.
_UNPARSED = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
ALLOWED = (
    '{"inputs": [...], "outputs": [...]}, the same with "fn_name", [{"input": ..., "output": ...}], '
    '{"assertions": [...]}, or Python statements with an assert'
)


@dataclass(frozen=True)
class Streams:
    """stdin and expected stdout of each test."""

    pairs: list[tuple[str, str]]


@dataclass(frozen=True)
class Assertions:
    """Python statements; those that do not count prepare the others."""

    statements: list[tuple[str, bool]]
    entry_point: str | None


# How tests call a function. JSON has neither tuples nor numbers as keys, so a tuple equals a list, and keys of digits
# become numbers. A class `Solution` takes precedence, as in the data sets' own code. `globals` leaves out builtins.
_CALLS = """
def as_numbers(pairs):
    return {{int(key): value for key, value in pairs.items()}} if pairs and all(map(str.isdecimal, pairs)) else pairs

def call_program(*arguments):
    if "Solution" in globals() and hasattr(Solution, {name!r}):
        return Solution().{name}(*arguments)
    if {name!r} in globals():
        return {name}(*arguments)
    raise NameError("the program defines no {name}")

def same_value(value, expected):
    if isinstance(expected, list):
        one_by_one = isinstance(value, (list, tuple)) and len(value) == len(expected)
        return one_by_one and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        same_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return same_keys and all(same_value(value[key], expected[key]) for key in expected)
    if {tolerance!r} is not None and isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol={tolerance!r}, abs_tol={tolerance!r})
    return value == expected

def as_expected(value, expected):
    return same_value(value, expected) or ({wrapped} and same_value(value, expected[0]))
"""


def read_tests(tests: Any, tolerance: float | None = None) -> Streams | Assertions:
    """Read tests in one of the forms that `run_code_tests` lists; raises `ValueError` for any other form."""
    shown = repr(tests)[:100]
    tests, text = _loaded(tests), tests
    if _is_list(tests) and tests and all(isinstance(test, Mapping) for test in tests):
        tests = _joined(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not (_is_list(inputs) and _is_list(outputs) and len(inputs) == len(outputs) > 0):
            raise ValueError(f"tests = {shown}: inputs and outputs must be lists of the same length, and not empty")
        if (name := tests.get("fn_name")) is not None:
            return _calls(name, inputs, outputs, tolerance)
        return Streams([(_text(x), _text(y)) for x, y in zip(inputs, outputs, strict=True)])
    entry_point = None
    if isinstance(tests, Mapping):
        tests, entry_point = tests.get("assertions"), tests.get("entry_point")
        if entry_point is not None and not _is_expression(entry_point):
            raise ValueError(f"tests: entry_point = {entry_point!r:.100} is not the name of a function")
    if isinstance(tests, str) and tests is text:
        tests = _split(tests)
    if not _is_list(tests) or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"tests = {shown}; allowed: {ALLOWED}")
    statements = [(test.encode("utf-8", "replace").decode(), _counts(test)) for test in tests]
    statements += [(call, True) for call in _uncalled([source for source, _ in statements], entry_point)]
    if not any(counts for _, counts in statements):
        raise ValueError(f"tests = {shown}: no statement that could fail; definitions and assignments do not count")
    return Assertions(statements, entry_point)


def _loaded(tests: Any) -> Any:
    """A text parsed as JSON or as a Python literal; other texts and values unchanged."""
    for read in (json.loads, ast.literal_eval) if isinstance(tests, str) else ():
        try:
            return read(tests)
        except _UNPARSED:
            continue
    return tests


def _split(text: str) -> list[str] | None:
    """Top-level statements of a Python text that asserts anything; None if it does not."""
    try:
        tree = ast.parse(text)
    except _UNPARSED:
        return None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        return None
    return [ast.unparse(node) for node in tree.body]


def _joined(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A list of `{input, output}`, LiveCodeBench's form, as `{inputs, outputs}`; None if it is something else."""
    if not all({"input", "output"} <= test.keys() for test in tests):
        return None
    joined = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
    if all(test.get("testtype", "stdin") == "stdin" for test in tests):
        return joined
    metadata = _loaded(tests[0].get("metadata"))
    name = tests[0].get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    if name is None:
        raise ValueError(
            'tests of a function (testtype: functional) do not name it; give {"fn_name": ..., "inputs": ...}'
        )
    return joined | {"fn_name": name}


def _calls(name: Any, inputs: Sequence[Any], outputs: Sequence[Any], tolerance: float | None) -> Assertions:
    """Tests that call a function, or a method of the class `Solution`, and compare what it returns.

    Raises:
        ValueError: the name is not an identifier, an input is not a list of arguments, or JSON cannot hold a value.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"tests: fn_name = {name!r} is not the name of a function")
    pairs = [_call(x, y) for x, y in zip(inputs, outputs, strict=True)]
    # APPS may put each output into a list of its own.
    wrapped = all(_is_list(y) and len(y) == 1 for _, y in pairs)
    load = "json.loads({!r}, object_hook=as_numbers)"
    statements = [
        (f"assert as_expected(call_program(*{load.format(_json(x))}), {load.format(_json(y))})", True) for x, y in pairs
    ]
    preparation = "import json, math\n" + _CALLS.format(name=name, tolerance=tolerance, wrapped=wrapped)
    return Assertions([(preparation, False), *statements], name)


def _call(arguments: Any, expected: Any) -> tuple[list[Any], Any]:
    """Arguments and expected result of a call; a text has each argument as JSON in a line of its own."""
    if isinstance(arguments, str):
        try:
            arguments = [json.loads(line) for line in arguments.strip().split("\n")]
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except _UNPARSED:
            raise ValueError(f"tests: input {arguments!r:.100} and output {expected!r:.100} are not JSON") from None
    if not _is_list(arguments):
        raise ValueError(f"tests: input {arguments!r:.100} of a call is not a list of arguments")
    return list(arguments), expected


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except _UNPARSED as error:
        raise ValueError(f"tests: {value!r:.100} of a call cannot be JSON ({error})") from None


def _is_expression(text: Any) -> bool:
    """Whether a text is an expression, such as a name or `Solution().method`, and not a constant; or it is empty."""
    try:
        return isinstance(text, str) and (not text or not isinstance(ast.parse(text, mode="eval").body, ast.Constant))
    except _UNPARSED:
        return False


def _uncalled(tests: Sequence[str], entry_point: str | None) -> list[str]:
    """Calls of test functions that nothing calls: pytest's, and HumanEval's `check(candidate)`."""
    trees = [ast.parse(test) for test in tests]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    calls = []
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)):
        needed = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
        if node.name.startswith("test_") and needed == 0 and node.name not in called:
            calls.append(f"{node.name}()")
        elif node.name == "check" and needed == 1 and entry_point and "check" not in called:
            calls.append(f"check({entry_point})")
    return calls


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _text(value: Any) -> str:
    """An input or output: text, or a list of lines."""
    text = "\n".join(map(str, value)) if _is_list(value) else str(value)
    return text.encode("utf-8", "replace").decode()


def _counts(statement: str) -> bool:
    try:
        body = ast.parse(statement).body
        with warnings.catch_warnings(action="ignore"):
            # It finds more than the parser, such as an `await` outside of a function.
            compile(statement, "<test>", "exec", dont_inherit=True)
    except _UNPARSED as error:
        raise ValueError(f"tests: {statement[:100]!r} is not Python ({type(error).__name__})") from None
    return any(not isinstance(node, (*_PREPARATION, ast.AnnAssign, ast.Pass)) for node in body)
