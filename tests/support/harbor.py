"""Tasks in Harbor's folders."""

from __future__ import annotations

from pathlib import Path

FILES = {
    "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n"
    '[environment]\ncpus = 2\nmemory = "1G"\nstorage_mb = 500\nnetwork_mode = "no-network"\n',
    "instruction.md": "Make add.py add.\n",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "#!/bin/sh\n",
    "solution/solve.sh": "#!/bin/sh\n",
}


def harbor_task(folder: Path, **changes: str | None) -> Path:
    """Write a task; changes name files with `_` for `/` and `.`, None for a file that is not there."""
    for path, text in FILES.items():
        text = changes.pop(path.replace("/", "_").replace(".", "_"), text)
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    assert not changes
    return folder
