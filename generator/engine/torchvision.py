"""Lets vLLM read the language part of a model whose module also has a vision part, where torchvision is missing.

vLLM and transformers import two modules of torchvision for processors of images, which a text model never makes. The
CPU's packages leave torchvision out.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from types import ModuleType

MODULES = ("torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def stand_in() -> None:
    """Put modules without functions in the place of torchvision's, if it is not installed."""
    if importlib.util.find_spec("torchvision") is not None or MODULES[0] in sys.modules:
        return
    # Not `torchvision` itself: transformers, which looks for it, would take it for installed.
    transforms, functional = map(ModuleType, MODULES)
    modes = enum.Enum("modes", ["NEAREST", "BILINEAR", "BICUBIC", "LANCZOS"])
    setattr(functional, "InterpolationMode", modes)  # noqa: B010
    setattr(transforms, "functional", functional)  # noqa: B010
    sys.modules |= {MODULES[0]: transforms, MODULES[1]: functional}
