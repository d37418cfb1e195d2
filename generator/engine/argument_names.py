"""Checks the names in `generator.engine` before anything is waited for, and without importing vLLM."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path

from common.config import Config
from common.errors import UserError

# The configuration keys that set these for the learner as well; None: the same in every run.
OWN_NAMES = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "learner.weights",
    "enable_lora": "learner.lora",
    "lora_target_modules": "learner.lora.targets",
    "logprobs_mode": None,
}
CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check_engine_names(config: Config) -> None:
    """Refuse names that vLLM's engine arguments do not have, and those with a configuration key of their own.

    Raises:
        UserError: names the argument, and those it may have been meant for.
    """
    for name in config.generator.engine:
        if name in OWN_NAMES:
            own = OWN_NAMES[name]
            raise UserError(
                f"generator.engine: set {own} instead of {name}"
                if own
                else f"generator.engine: {name} is 'processed_logprobs', which training needs; leave it out"
            )
        allowed = engine_names()
        if allowed and name not in allowed:
            near = difflib.get_close_matches(name, sorted(allowed), n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "see vLLM's engine arguments"
            raise UserError(f"generator.engine: vLLM has no engine argument {name!r}; {hint}")


@cache
def engine_names() -> frozenset[str]:
    """Fields of the installed vLLM's `AsyncEngineArgs`; empty where vLLM is not installed.

    Read from its source: importing it takes as long as starting a small engine.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return frozenset(
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )
