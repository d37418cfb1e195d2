"""Renders demonstrations into a run folder, as tokens with weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import log as logs
from common.config import Config, dump_config, load_config
from common.errors import UserError, reports_user_errors
from common.files import rewrite
from common.process import ending
from learner.batch.demonstrations import Demonstrations, folder_of


def render(config: Config, paths: str | Sequence[str], key: str, split: str, folder: Path, log: Any) -> None:
    """Render all rows of some files into a folder; see `load_demonstrations`."""
    # Imported here, since the command line starts without what a generator needs.
    from generator.chat.token_text import load_tokenizer
    from launcher.demonstrations.rows import RowReader, load_demonstrations

    reader = RowReader(config, load_tokenizer(config.model.path, config.model.trust_remote_code))
    load_demonstrations(config, paths, reader, key, split, log).save(folder)


def render_for_run(config: Config, log: Any) -> None:
    """Render the data of `algorithm.demonstrations`, if there is any, in a child process.

    Its libraries do not stay in the memory of this process.

    Raises:
        UserError: the data cannot be read, or no row can be used.
    """
    if config.algorithm.demonstrations.data is None or not config.run.has_learner:
        return
    folder = folder_of(config, "mixed")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    rewrite(file, [dump_config(config, absolute=True).encode()])
    command = [sys.executable, "-P", "-m", "launcher.demonstrations.render", str(file)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    lines = done.stderr.splitlines()  # such as warnings of rows that were skipped
    # Libraries may write more lines while the process ends.
    errors = [line for line in lines if line.startswith("error: ") and done.returncode]
    sys.stderr.writelines(f"{line}\n" for line in lines if line not in errors)
    if errors:
        raise UserError(errors[-1].removeprefix("error: "))
    if done.returncode:
        last = f": {lines[-1]}" if lines else ""
        raise UserError(f"rendering algorithm.demonstrations.data ended with {ending(done.returncode)}{last}")
    rows = Demonstrations.open(folder)
    log.info("demonstrations", rows=len(rows), tokens=rows.tokens, trained_on=rows.trained_tokens)


@reports_user_errors
def main() -> None:
    """Render the demonstrations of the run whose configuration is the only argument."""
    config = load_config(Path(sys.argv[1]), ())
    data = config.algorithm.demonstrations.data
    if data is None:
        raise UserError("algorithm.demonstrations.data is not set: the run has no demonstrations")
    folder = folder_of(config, "mixed")
    render(config, data, "algorithm.demonstrations.data", "train", folder, logs.setup("launcher"))


if __name__ == "__main__":
    main()
