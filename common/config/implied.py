"""Settings that others imply, where the user has set nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A tracker that only keeps count selects nothing, and is worth no pass.
WITHOUT_BASELINE = {"sampler": {"drift": {"mode": "constant"}, "selection": {"criterion": "uniform"}}}
# One task at a time, and each batch from the weights that train on it.
SERIAL = {"sampler": {"max_staleness": 0}, "generator": {"max_concurrency": 1}}


def fill_in(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration with what its settings imply."""
    if _value(tree, "algorithm", "method") not in (None, "spo"):
        tree = _beneath(tree, WITHOUT_BASELINE)
    if _value(tree, "run", "deterministic") is True:
        tree = _beneath(tree, SERIAL)
    return tree


def _value(tree: Mapping[str, Any], section: str, key: str) -> Any:
    values = tree.get(section)
    return values.get(key) if isinstance(values, Mapping) else getattr(values, key, None)


def _beneath(values: Mapping[str, Any], implied: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values`, and of `implied` what they leave open."""
    merged = {**implied, **values}
    for key in implied.keys() & values.keys():
        if isinstance(implied[key], Mapping) and isinstance(values[key], Mapping):
            merged[key] = _beneath(values[key], implied[key])
    return merged
