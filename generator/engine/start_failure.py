"""Brings the reason why a process of vLLM could not start to the process that started it.

vLLM writes the reason to the log of the failed process; the error that reaches the caller is "Engine core
initialization failed. See root cause above."
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

REASON_FILE = "SPO_START_FAILURE"  # environment variable that names the file
LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")


class ReasonWriter(logging.Filter):
    """Writes the first exception that ends the start of a process to the file; a worker fails before its engine does.

    It is a filter that lets every record pass, because vLLM removes handlers when it configures its loggers again.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        path = os.environ.get(REASON_FILE)
        error = record.exc_info[1] if record.exc_info else None
        if path is not None and error is not None and record.getMessage().endswith("failed to start."):
            with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
                file.write(str(error) or type(error).__name__)
        return True


def report() -> None:
    """Have this process of vLLM write the reason, if it cannot start."""
    for name in LOGGERS:
        log = logging.getLogger(name)
        if not any(isinstance(one, ReasonWriter) for one in log.filters):
            log.addFilter(ReasonWriter())


@contextlib.contextmanager
def reported() -> Iterator[Callable[[], str]]:
    """Within the block, processes of vLLM report why they cannot start.

    Yields:
        A function that returns the reason; "" if no process has reported one.
    """
    with tempfile.TemporaryDirectory(prefix="spo-start-") as folder:
        path = Path(folder) / "reason"
        os.environ[REASON_FILE] = str(path)
        try:
            yield lambda: path.read_text(encoding="utf-8") if path.exists() else ""
        finally:
            del os.environ[REASON_FILE]
