"""The families of tasks in the package reasoning-gym: they generate problems, and each has a verifier of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from common.errors import UserError, nearest
from common.plugins import check_options

RUN_ANSWERS = (
    "binary_matrix", "intermediate_integration", "n_queens", "polynomial_multiplication", "simple_integration",
    "spiral_matrix", "string_insertion",
)  # fmt: skip
REFUSED = {
    "composite": "it mixes other families; name each of them as a source of its own",
    **dict.fromkeys(RUN_ANSWERS, "its verifier evaluates the model's answer as Python code, outside of any sandbox"),
    **dict.fromkeys(("codeio", "isomorphic_strings", "ransom_note"), "its problems differ between processes"),
}
# These evaluate answers too, but an answer that is not a sum, product or quotient of numbers is wrong anyway.
ARITHMETIC = re.compile(r"(?:[\d\s.+/()-]|\*(?!\*))*")
ARITHMETIC_ANSWERS = ("countdown", "puzzle24")


def make_family(name: str, options: Mapping[str, Any], field: str) -> Any:
    """The data set of a family: items by index, and `score_answer(answer, item)`.

    Args:
        options: the family's own; `seed` and `size` are two of them.
        field: configuration key to blame.

    Raises:
        UserError: the package is missing, has no such family, or the family cannot be used, or not with these options.
    """
    families = installed_families()
    if name not in families:
        near = nearest(name, sorted(families), 0.0)
        raise UserError(f"{field}: reasoning-gym has no family {name!r}; the nearest of its {len(families)}: {near}")
    if name in REFUSED:
        raise UserError(f"{field}: family {name!r} of reasoning-gym cannot be used: {REFUSED[name]}")
    dataset, config = families[name]
    checked = check_options(config, options, field)
    try:
        return dataset(config=config(**checked))
    except Exception as error:  # an assertion of `validate`, or whatever a family raises on options it cannot use
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UserError(f"{field}: options {dict(options)} of family {name!r}: {reason}") from None


def score_answer(family: str, answer: str, entry: Mapping[str, Any]) -> float:
    """The score of an answer by the family's verifier, within [0, 1]; 0 for an answer on which the verifier fails.

    Args:
        entry: the item as it was generated, with the `options` that are not the family's defaults.
    """
    verifier = _verifier(family, json.dumps(entry.get("options", {})))
    if family in ARITHMETIC_ANSWERS and not ARITHMETIC.fullmatch(answer):
        return 0.0
    try:
        return min(max(0.0, float(verifier.score_answer(answer, entry))), 1.0)  # in this order NaN becomes 0
    except Exception:  # verifiers parse what the model wrote, and not all of them can handle any text
        return 0.0


@functools.lru_cache(maxsize=256)
def _verifier(family: str, options: str) -> Any:
    return make_family(family, json.loads(options), "reasoning_gym")


@functools.cache
def installed_families() -> dict[str, tuple[type, type]]:
    """{name: (class of the data set, class of its options)}; raises `UserError` if the package is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("the reasoning-gym package is missing; pip install 'spo-trainer[gym]'")
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        # It must be compiled, and only one family calls it: the others should work without a compiler.
        sys.modules["pycosat"] = Missing("pycosat")
    import reasoning_gym  # noqa: F401 (its import fills the table)
    from reasoning_gym.factory import DATASETS

    return dict(DATASETS)


class Missing(ModuleType):
    """Stands in for a module that is not installed; raises once something in it is used."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the package {self.__name__} is missing; pip install {self.__name__}")
