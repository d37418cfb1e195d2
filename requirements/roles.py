"""Which of the pinned packages each role needs: writes `requirements/<role>.lock` from `cpu.lock` and pyproject.toml.

    python requirements/roles.py            # after cpu.lock or the extras have changed, inside .venv
    python requirements/roles.py --check    # exit code 1 where a file is not what it would write

An image holds one role. What a package needs is read from its installed metadata; what cpu.lock leaves out on purpose
is left out here too.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent
ROLES = {
    "sampler": ("sampler", "tools"),
    "generator": ("generator-cpu", "tools"),
    "learner": ("learner-cpu", "tools"),
    "sandbox": ("sandbox",),
}
# Some packages are needed on the first releases of Python 3.11 only.
PYTHONS = ("3.11.0", "3.11.99")
# Builds the wheel and the few source packages.
BUILD = ("packaging", "setuptools", "wheel")


def pinned() -> dict[str, str]:
    """Name and pin of every line of cpu.lock."""
    lines = (FOLDER / "cpu.lock").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.split("==")[0]): line for line in lines if "==" in line and line[0] != "#"}


def extras() -> dict[str, list[str]]:
    """Requirements of the project by extra; those of all under the empty name."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def closure(names: Iterable[str], pins: dict[str, str], own: dict[str, list[str]], project: str) -> set[str]:
    """Packages that the project's extras need, and what those need in turn, as far as it is pinned."""
    packages: set[str] = set()
    waiting = [Requirement(line) for name in ("", *names) for line in own[name]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, requested = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, requested) in seen:
            continue
        seen.add((name, requested))
        if name == project:
            waiting += [Requirement(line) for extra in requirement.extras for line in own[extra]]
            continue
        if name not in pins:
            continue
        packages.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            raise SystemExit(f"{name} is pinned and not installed: run `make setup` first") from None
        for line in lines:
            needed = Requirement(line)
            if applies(needed, requested):
                waiting.append(needed)
    return packages


def applies(needed: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement holds for any of the extras and Pythons."""
    if needed.marker is None:
        return True
    environments = ({"extra": extra, "python_full_version": python} for extra in ("", *extras) for python in PYTHONS)
    return any(needed.marker.evaluate(environment) for environment in environments)


def lock(role: str) -> str:
    """The file of a role."""
    pins = pinned()
    names = closure(ROLES[role], pins, extras(), "spo-trainer") | set(BUILD)
    head = f"# What the {role} runs: the part of cpu.lock that it needs, as requirements/roles.py finds it.\n"
    return head + "".join(f"{pins[name]}\n" for name in sorted(names))


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    wrong = []
    for role in ROLES:
        path = FOLDER / f"{role}.lock"
        text = lock(role)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            wrong.append(path.name)
    if wrong:
        sys.stderr.write(f"{', '.join(wrong)}: not up to date; run `python requirements/roles.py`\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
