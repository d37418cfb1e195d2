"""All checks of `spo run` before it starts anything."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from common.config import Config, dump_config
from common.errors import UserError
from launcher.checks.rewards import check_with_rewards


def check_before_start(config: Config) -> None:
    """Check a run on this machine; raises `UserError`.

    Another process checks the prompts meanwhile, so that its libraries do not stay in memory here.
    """
    with tempfile.TemporaryDirectory(prefix="spo-check-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config, absolute=True))
        command = [sys.executable, "-P", "-m", "launcher.checks.prompts", str(file)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                check_with_rewards(config)
                _, problems = process.communicate()
            finally:
                process.kill()
    if process.returncode:
        line = (problems.strip().splitlines() or ["the prompts could not be checked"])[-1]
        raise UserError(line.removeprefix("error: "))
