"""A sampler's file beside a checkpoint is whole, or it is not taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.files import tracker_is_whole


@pytest.mark.parametrize("where", [6, 8, -60])
def test_a_file_with_one_wrong_byte_anywhere_is_not_whole(tmp_path: Path, where: int) -> None:
    path = tmp_path / "step_1.npz"
    np.savez(path, values=np.arange(100.0))
    assert tracker_is_whole(path)
    data = bytearray(path.read_bytes())
    directory = data.rindex(b"PK\x01\x02")
    # In the directory of the archive: flags, method of compression, and what comes behind.
    data[directory + 2 + where if where > 0 else where] ^= 0x09
    path.write_bytes(data)
    assert not tracker_is_whole(path)
