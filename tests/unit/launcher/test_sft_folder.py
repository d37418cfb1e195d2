"""Demonstrations in a run folder: rendered once by `spo sft` and at each start of a run, and what must not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from common.config import Config, load_config, parse_config
from common.errors import UserError
from launcher.demonstrations.render import render_for_run
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.sft.settings import supervised
from launcher.sft.train import prepare
from learner.batch.demonstrations import Demonstrations, folder_of


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rows(path: Path, count: int) -> None:
    path.write_text(json.dumps({"prompt": "What is 1?", "completion": "1"}) + "\n")
    path.write_text(path.read_text() * count)


def config_of(tokenizer: Path, run: dict[str, Any] | None = None, **sft: Any) -> Config:
    folder = tokenizer.parent
    return supervised(
        parse_config(
            {
                "model": {"path": str(tokenizer), "max_model_len": 64},
                "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
                "run": {"output_dir": str(folder / "runs")} | (run or {}),
                "sft": {"data": str(folder / "rows.jsonl"), "batch_size": 4} | sft,
            }
        )
    )


def with_checkpoint(config: Config) -> None:
    checkpoint = config.run.folder / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").touch()


def test_demonstrations_are_rendered_again_until_there_is_a_checkpoint(tokenizer: Path) -> None:
    config, log, data = config_of(tokenizer), mock.Mock(), tokenizer.parent / "rows.jsonl"
    rows(data, 6)
    assert prepare(config, log).run.steps == 2
    rows(data, 9)
    assert prepare(config, log).run.steps == 3
    with_checkpoint(config)
    rows(data, 1)
    assert prepare(config, log).run.steps == 3
    assert len(Demonstrations.open(folder_of(config, "train"))) == 9
    # The configuration in the folder trains the same again.
    saved = load_config(config.run.folder / "config.yaml", environ={})
    assert (supervised(saved).learner, saved.run.steps) == (config.learner, 3)
    assert prepare(config_of(tokenizer, epochs=2), log).run.steps == 5


CHANGED: dict[str, dict[str, Any]] = {
    "sft.batch_size = 4, and it is 8 now": {"batch_size": 8},
    "sft.train = 'all', and it is 'last' now": {"train": "last"},
    "run.seed = 0, and it is 1 now": {"run": {"seed": 1}},
}


@pytest.mark.parametrize("reason", CHANGED)
def test_what_the_order_of_training_depends_on_cannot_change(reason: str, tokenizer: Path) -> None:
    config = config_of(tokenizer)
    rows(tokenizer.parent / "rows.jsonl", 6)
    prepare(config, mock.Mock())
    with_checkpoint(config)
    with pytest.raises(UserError, match=reason):
        prepare(config_of(tokenizer, **CHANGED[reason]), mock.Mock())


def test_the_folder_of_a_run_and_missing_data_are_refused(tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"sft\.data is missing"):
        prepare(config_of(tokenizer, data=None), mock.Mock())
    folder = tokenizer.parent / "runs" / "sft"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    with pytest.raises(UserError, match="the folder of another run"):
        prepare(config_of(tokenizer), mock.Mock())


def mixing(tokenizer: Path) -> Config:
    return parse_config(
        {
            "model": {"path": str(tokenizer), "max_model_len": 64},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 32},
            "run": {"output_dir": str(tokenizer.parent / "runs")},
            "algorithm": {"demonstrations": {"data": str(tokenizer.parent / "rows.jsonl")}},
        }
    )


@pytest.mark.integration
def test_a_start_renders_what_the_run_mixes_in_and_says_what_it_skips(
    tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = mixing(tokenizer), tokenizer.parent / "rows.jsonl"
    for count in (6, 2):
        rows(data, count)
        with data.open("a") as file:
            file.write('{"prompt": "What is 1?"}\n')
        render_for_run(config, mock.Mock())
        assert len(Demonstrations.open(folder_of(config, "mixed"))) == count
        assert f"count=1 data={data} of={count + 1}" in capsys.readouterr().err
    data.write_text("{}\n")
    with pytest.raises(UserError, match=r"algorithm\.demonstrations\.data = .*: none of the 1 rows can be used"):
        render_for_run(config, mock.Mock())


def test_a_learner_without_the_rendered_rows_names_what_renders_them(tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"`python -m launcher\.demonstrations\.render CONFIG` does"):
        Demonstrations.open(folder_of(mixing(tokenizer), "mixed"))
