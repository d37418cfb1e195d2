"""How a rank ends: with the exit code it means, whatever threads it still has."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def exits_at_once(entry: Callable[[], None]) -> Callable[[], NoReturn]:
    """Wrap a console entry point: the process ends without tearing the interpreter down.

    DeepSpeed keeps the process group, so its threads outlive `destroy_process_group`. One of them that lets go of a
    tensor while the interpreter is torn down finds no interpreter to do it in, and aborts the process ("terminate
    called without an active exception", exit code 134), although its work is done.
    """

    def main() -> NoReturn:
        code = 0
        try:
            entry()
        except SystemExit as end:
            code = _number(end.code)
        except BaseException:
            traceback.print_exc()
            code = 1
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    return main


def _number(code: object) -> int:
    """What `sys.exit` makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201
    return 1
