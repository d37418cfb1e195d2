"""Whether what the trackers of `run.log_to` need is installed, and known before anything is loaded."""

from __future__ import annotations

import netrc
import os
from importlib.util import find_spec
from urllib.parse import urlsplit

from common.config import Config
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.process import Role

NAME = "trackers"
EXTRAS = {"tensorboard": "metrics", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
WITHOUT_KEY = ("offline", "dryrun", "disabled", "shared")  # modes of wandb


def trackers(context: Context, config: Config) -> Finding | None:
    """Whether the sampler can write to each tracker."""
    if context.role is not Role.SAMPLER or not config.run.log_to:
        return None
    for name in config.run.log_to:
        if find_spec(name) is None:
            return problem(
                NAME,
                f"run.log_to names {name}, which is not installed: pip install 'spo-trainer[{EXTRAS[name]}]', or leave "
                "it out",
            )
    if "wandb" in config.run.log_to and not _has_wandb_key():
        return problem(
            NAME, "run.log_to names wandb, and there is no key for it: `wandb login`, or set WANDB_MODE=offline"
        )
    return ok(NAME, f"{', '.join(config.run.log_to)} installed")


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_MODE") in WITHOUT_KEY or os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
