"""The benchmarks' command lines: what cannot be used is named in one line on stderr, with exit code 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from common.errors import fail

ROOT = Path(__file__).resolve().parents[1]


class Parser(argparse.ArgumentParser):
    """Shows the module's text as it is."""

    def __init__(self, description: str | None = None, **more: Any) -> None:
        more.setdefault("prog", f"python -m {module_name(Path(sys.argv[0]))}")
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        """Exit with the message alone; the usage is long."""
        fail(f"{message} (see --help)")


def module_name(script: Path) -> str:
    """What `python -m` calls a file of this repository; the file's own name of any other."""
    path = script.resolve()
    if not path.is_relative_to(ROOT):
        return script.name
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option: a whole number, this or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return number


positive = at_least(1)


def above_zero(text: str) -> float:
    """The type of an option: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def folder(text: str) -> Path:
    """The type of an option: a folder that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return path


def model(text: str) -> Path:
    """The type of an option: a model's folder, as transformers writes it."""
    path = folder(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a model folder: it has no config.json")
    return path


def checkout(text: str) -> Path:
    """The type of an option: the folder of a checkout of this repository; an absolute path."""
    path = folder(text).resolve()
    if not (path / "common").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a checkout: it has no folder 'common'")
    return path


def file(text: str) -> Path:
    """The type of an option: a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def new_file(text: str) -> Path:
    """The type of an option: a file to write, whose folder exists."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path
