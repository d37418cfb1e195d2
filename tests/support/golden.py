"""The golden cases, by their id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "spo_golden.json").read_text())["cases"]
}
