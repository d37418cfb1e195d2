"""Errors that a user can cause, and text as a terminal may show it.

What models and servers write could move the cursor, change colours or reorder lines; such characters are escaped.
"""

from __future__ import annotations

import difflib
import sys
import unicodedata
from collections.abc import Callable, Iterable
from typing import NoReturn

# Control, format (bidirectional overrides among them), half surrogate pairs, private use, line separators.
_ACTIVE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
# They join letters and emoji, and do nothing else.
_HARMLESS = frozenset("\u200c\u200d")


class UserError(Exception):
    """An input of the user cannot be used; the message names it and what is allowed."""


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


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar name, a suggestion for a misspelt one; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def visible(text: str) -> str:
    """A text of several lines: line breaks and tabs stay, everything else a terminal would act on is escaped."""
    return "".join(character if character in "\n\t" else _escaped(character) for character in text)


def one_line(text: str) -> str:
    """A text as one line: white space of any kind becomes a blank, the rest is as in `visible`."""
    return "".join(map(_escaped, " ".join(text.split())))


def _escaped(character: str) -> str:
    if character.isascii() and character.isprintable():
        return character
    if unicodedata.category(character) not in _ACTIVE or character in _HARMLESS:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
