"""The limit of open files, which every process raises for itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [(100, 900, 500, 500), (100, 300, 500, 300), (700, 900, 500, 700)],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(soft: int, hard: int, most: int, raised: int) -> None:
    code = f"""
import json, resource
from common.process import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(json.dumps([raise_file_limit({most}), *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == [raised, raised, hard]
