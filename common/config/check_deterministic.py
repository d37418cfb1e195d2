"""What contradicts `run.deterministic`: settings under which timing would decide over a result."""

from __future__ import annotations

from typing import Any

from common.config.sections import Config
from common.config.source_config import episodes_in_use
from common.errors import UserError

# vLLM's arguments that put several requests together, or let one find what another has computed.
ENGINE: dict[str, Any] = {"max_num_seqs": 1, "data_parallel_size": 1, "enable_prefix_caching": False}


def check_deterministic(config: Config) -> None:
    """Raise `UserError` for a setting that a deterministic run cannot have."""
    if not config.run.deterministic:
        return
    needed: list[tuple[str, Any, Any, str]] = [
        ("sampler.max_staleness", config.sampler.max_staleness, 0, "each batch is answered by the weights it trains"),
        ("generator.max_concurrency", config.generator.max_concurrency, 1, "one task is played at a time"),
    ]
    needed += [
        (f"generator.engine.{name}", config.generator.engine.get(name, value), value, "one request is computed alone")
        for name, value in ENGINE.items()
    ]
    needed += [
        (f"{key}.max_seconds", episode.max_seconds, None, "no clock may cut an answer")
        for key, episode in episodes_in_use(config).items()
    ]
    if config.algorithm.responses > 1 and config.sampler.drift.mode == "rescore":
        needed.append(("sampler.drift.mode", "rescore", "constant", "members of a group have no order"))
    for key, value, only, why in needed:
        if value != only:
            shown = "null" if only is None else str(only).lower()
            raise UserError(
                f"{key} = {value!r} contradicts run.deterministic, under which {why}; set {shown}, or leave it out"
            )


def check_one_generator(config: Config, generators: int) -> None:
    """Raise `UserError` for more than one generator of a deterministic run."""
    if config.run.deterministic and generators > 1:
        raise UserError(
            f"run.deterministic plays one task at a time, and {generators} generators were asked for; start one"
        )
