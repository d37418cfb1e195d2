"""Finds a class or function that the configuration names: a built-in name, or `module:object` of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from common.errors import UserError


def load_object(name: str, builtin: Mapping[str, Any], field: str) -> Any:
    """The object behind `name`.

    Raises:
        UserError: no such built-in, module or object; `field` is the configuration key to blame.
    """
    if name in builtin:
        return builtin[name]
    module_name, colon, attribute = name.partition(":")
    allowed = f"allowed: {', '.join(builtin)}, or module:object of your own"
    if not colon:
        raise UserError(f"{field} = {name!r} is unknown; {allowed}")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise UserError(f"{field} = {name!r}: cannot import {module_name} ({error}); {allowed}") from None
    except AttributeError:
        raise UserError(f"{field} = {name!r}: module {module_name} has no {attribute}; {allowed}") from None
