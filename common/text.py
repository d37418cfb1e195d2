"""Text of models and servers on a terminal: what could move the cursor, change colours or reorder lines is escaped."""

from __future__ import annotations

import unicodedata

# Control, format (bidirectional overrides among them), half surrogate pairs, private use, line separators.
_ACTIVE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
# They join letters and emoji, and do nothing else.
_HARMLESS = frozenset("\u200c\u200d")


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
