"""Errors that a user can cause: one line on stderr, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from common.text import one_line


class UserError(Exception):
    """Something the user gave cannot be used; the message names it and what is allowed."""


def fail(message: str) -> NoReturn:
    """Print one line on stderr and leave with exit code 2."""
    # It may quote what a model or a server has written.
    print(f"error: {one_line(message)}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)


def reports_user_errors(app: Callable[[], None]) -> Callable[[], None]:
    """Wrap a console entry point: a `UserError` becomes one line and exit code 2, never a traceback."""

    def main() -> None:
        try:
            app()
        except UserError as error:
            fail(str(error))
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return main
