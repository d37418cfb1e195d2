from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_table import QWEN3_8B
from common.config import Config
from launcher.layout.layout import NOTHING_ASKED, Choice, Placement, lay_out
from tests.support.checks import config_of
from tests.support.gpus import StandInGpus
from tests.support.spo_command import Spo, spo_here

SAVING = {"zero_stage": 2, "gradient_checkpointing": True, "mini_batches": 8}


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Spo:
    """The command `spo`, run in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return spo_here(capsys, monkeypatch)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInGpus:
    return StandInGpus(tmp_path / "bin", monkeypatch)


@pytest.fixture(scope="session")  # the memory of a model is computed once for each path, and takes seconds
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B without weights."""
    folder = tmp_path_factory.mktemp("Qwen3-8B")
    QWEN3_8B.save_pretrained(folder)
    return folder


@pytest.fixture
def config(model: Path) -> Callable[..., Config]:
    """Builds a configuration that trains Qwen3-8B on H100s; MODEL stands for its path."""

    def build(learner: dict[str, Any] | None = None, **sections: Any) -> Config:
        settings: dict[str, Any] = {
            "model": {"path": "MODEL", "max_model_len": 10_240},
            "sampler": {"batch_size": 768},
            "episode": {"max_response_tokens": 8192},
            "learner": SAVING | (learner or {}),
        }
        return config_of(**json.loads(json.dumps(settings | sections).replace("MODEL", str(model))))

    return build


@pytest.fixture
def laid_out(config: Callable[..., Config], gpus: StandInGpus) -> Callable[..., Placement]:
    """Lays a run out on so many GPUs, or on those that `StandInGpus.are` makes of these words."""

    def build(present: int | dict[str, Any], asked: Choice = NOTHING_ASKED, **sections: Any) -> Placement:
        gpus.are(**({"count": present} if isinstance(present, int) else present))
        return lay_out(config(**sections), asked)

    return build
