"""Starts the ranks of one machine with torchrun's launcher, and returns their exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence

from common.keeper import die_with_parent
from common.process import leaving_no_trace

LAUNCHER = "SPO_LAUNCHER_PID"  # environment variable of a rank, which ends with this process
USER_ERROR = 2


@leaving_no_trace()
def launch(ranks: int, arguments: Sequence[str], unfinished_code: int, module: str = "learner.cli") -> int:
    """Run `spo-learner`, or another module, on `ranks` ranks, and return the exit code of the first that failed.

    The code is 0 if all ranks have trained to the end, and `unfinished_code` if a signal has ended them. A code of 2
    means, as for a single rank, that the input is wrong and another try is useless. torchrun itself would end with 1 in
    each of these cases.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ |= {LAUNCHER: str(os.getpid()), "PYTHONSAFEPATH": "1"}  # ranks inherit it
    options = {
        "--nproc-per-node": ranks,
        "--local-addr": "127.0.0.1",  # the machine's own name may not resolve
        "--max-restarts": 0,  # a supervisor starts this command again, with all ranks
        "--shutdown-timeout": 3600,  # for the last checkpoint
    }
    words = [str(word) for option in options.items() for word in option]
    try:
        run(parse_args(["--standalone", *words, "--module", module, *arguments]))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        code: int = error.get_first_failure()[1].exitcode
        return USER_ERROR if USER_ERROR in codes else code if code > 0 else 128 - code
    except SignalException:
        return unfinished_code
    return 0


def die_with_launcher() -> None:
    """Have this process, if it is a rank that `launch` has started, end when that process ends."""
    if launcher := os.environ.get(LAUNCHER):
        die_with_parent(lambda: os.getppid() == int(launcher))
