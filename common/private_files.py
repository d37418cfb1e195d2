"""Files of a run hold prompts, answers and weights, which only their owner and its group may read."""

from __future__ import annotations

import os

OTHERS = 0o027  # what new files and folders do not allow: writing by the group, anything by others


def keep_files_private() -> None:
    """Create files as 0640 or stricter from now on, folders as 0750; processes started later do the same."""
    os.umask(os.umask(OTHERS) | OTHERS)
