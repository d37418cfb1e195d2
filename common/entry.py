"""Console entry points: whatever a user gets wrong is one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from common.errors import UserError, reports_user_errors

OURS = ("common", "generator", "launcher", "learner", "relay", "sampler", "sandbox_client")


def entry_point(app: typer.Typer) -> Callable[[], None]:
    """Wrap an app: options and arguments that it does not take are reported like any other `UserError`."""

    def main() -> None:
        try:
            code = app(standalone_mode=False)
        except typer.Abort:
            raise SystemExit(1) from None
        except TyperException as error:
            _refuse(error)
        except ModuleNotFoundError as error:
            line = missing_package(error)
            if line is None:
                raise
            raise UserError(line) from None
        sys.exit(code if isinstance(code, int) else 0)

    return reports_user_errors(main)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """What to install, where an import failed; None where a module of SPO's own is missing."""
    package = (error.name or "").partition(".")[0]
    if not package or package in OURS:
        return None
    return (
        f"the package {package} is not installed; pip install 'spo-trainer[cpu]' or 'spo-trainer[gpu]' (`spo doctor` "
        "lists what each process needs)"
    )


def _refuse(error: Any) -> NoReturn:
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        # No command at all: its help says more than a line.
        sys.stderr.write(context.get_help())
        raise SystemExit(2)
    message = error.format_message().rstrip(".")
    hint = f"; see {context.command_path} --help" if context is not None and message[-1:] != "?" else ""
    raise UserError(f"{message[:1].lower()}{message[1:]}{hint}") from None
