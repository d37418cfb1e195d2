"""Names of metrics in trackers that have one list of them for a whole run, and the configuration as such a list."""

from __future__ import annotations

from typing import Any

from common.config import Config
from common.config.shared import without_secrets

OWN = "process/"  # what each process measures of itself


def flat_name(process: str, name: str) -> str:
    """`reward/mean`; of what several processes measure, `generator-1/tokens_per_second`."""
    if process in ("sampler", "learner") and not name.startswith(OWN):
        return name
    return f"{process}/{name.partition('/')[2] or name}"


def flat_config(config: Config) -> dict[str, Any]:
    """`sampler.batch_size: 8`, a key a setting."""
    return {
        f"{section}.{key}": value
        for section, values in without_secrets(config).model_dump(mode="json", by_alias=True).items()
        for key, value in values.items()
    }
