"""Modules of the user's own beside the YAML file: found, and never in the place of anything that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from common.config.sections import RunConfig

FOLDERS: list[Path] = []  # that this process looks in


def use_modules(run: RunConfig, folder: Path) -> RunConfig:
    """Look for modules in `run.modules`, or in `folder` where that is null; returns the section with what it is."""
    place = Path(run.modules).absolute() if run.modules is not None else folder
    if place not in FOLDERS:
        FOLDERS.append(place)
    if str(place) not in sys.path:
        sys.path.append(str(place))
    return run.model_copy(update={"modules": str(place)})


def hidden(module: str) -> str | None:
    """The user's file that `import module` does not reach, since something of this name is installed; None: it does."""
    top = module.partition(".")[0]
    origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    for folder in FOLDERS:
        for place in (folder / f"{top}.py", folder / top / "__init__.py"):
            if place.is_file() and origin is not None and place != Path(origin):
                return f"{place} is hidden by {origin}: give it another name"
    return None
