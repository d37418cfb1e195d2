from __future__ import annotations

import pytest

from tests.support.spo_command import Spo, spo_here


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spo:
    return spo_here(capsys, monkeypatch)
