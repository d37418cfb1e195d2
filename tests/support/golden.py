"""The golden files, and its cases by their id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN_FILE: dict[str, Any] = json.loads((FOLDER / "spo_golden.json").read_text())
# Losses, values and gradients, computed by the code of verl, TRL and AReaL.
LOSSES_FILE: dict[str, Any] = json.loads((FOLDER / "losses.json").read_text())
GOLDEN: dict[str, dict[str, Any]] = {case["id"]: case for case in GOLDEN_FILE["cases"]}


def golden(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case's inputs and expected outputs."""
    return GOLDEN[case]["inputs"], GOLDEN[case]["expected"]


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-10)
