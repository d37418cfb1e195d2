"""Demonstrations in a run folder: rendered once by `spo sft` and at each start of a run, and what must not change.

And which steps of `spo sft` are evaluated.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.config import Config, load_config
from common.errors import UserError
from launcher.demonstrations.render import render_for_run
from launcher.model_card import held_out
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.run.supervisor import EndedEarly
from launcher.sft.settings import supervised
from launcher.sft.train import answering, prepare, train
from learner.batch.demonstrations import Demonstrations, folder_of
from tests.support import checks
from tests.support.sampler import write_rows


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rows(path: Path, count: int) -> None:
    write_rows(path, *[{"prompt": "What is 1?", "completion": "1"}] * count)


def config_of(tokenizer: Path, run: dict[str, Any] | None = None, **sft: Any) -> Config:
    return supervised(run_of(tokenizer, run, sft={"data": str(tokenizer.parent / "rows.jsonl"), "batch_size": 4} | sft))


def run_of(tokenizer: Path, run: dict[str, Any] | None = None, **sections: Any) -> Config:
    model = {"path": str(tokenizer), "max_model_len": 64}
    data = {"train": "none.jsonl", "max_prompt_tokens": 32}
    run = {"output_dir": str(tokenizer.parent / "runs")} | (run or {})
    return checks.config_of(model=model, data=data, run=run, **sections)


def with_checkpoint(config: Config, step: int = 1) -> None:
    """A checkpoint with an export, in place of all others."""
    shutil.rmtree(config.run.folder / "checkpoints", ignore_errors=True)
    checkpoint = config.run.folder / "checkpoints" / f"step_{step}"
    model(checkpoint / "hf", step)
    (checkpoint / "checkpoint.json").touch()


def model(folder: Path, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.array([number])}, folder / "model.safetensors")


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


def test_a_start_that_ended_while_it_rendered_can_be_repeated(tokenizer: Path) -> None:
    config, data = config_of(tokenizer), tokenizer.parent / "rows.jsonl"
    rows(data, 6)
    prepare(config, mock.Mock())
    data.write_text("{}\n")
    with pytest.raises(UserError, match="none of the 1 rows can be used"):
        prepare(config, mock.Mock())
    rows(data, 9)
    assert prepare(config, mock.Mock()).run.steps == 3


def test_a_damaged_configuration_is_named(tokenizer: Path) -> None:
    config = config_of(tokenizer)
    rows(tokenizer.parent / "rows.jsonl", 6)
    prepare(config, mock.Mock())
    with_checkpoint(config)
    for damage, words in (("run: [", "config.yaml line 1 is not valid YAML"), ("run: 1", "sft.* = None, and it is ")):
        (config.run.folder / "config.yaml").write_text(damage)
        with pytest.raises(UserError, match=words):
            prepare(config, mock.Mock())


def test_fewer_than_no_ranks_are_refused(tokenizer: Path) -> None:
    with pytest.raises(UserError, match="--ranks -1 must be at least 0"):
        train(run_of(tokenizer), -1, mock.Mock())


def test_a_rendering_that_ended_is_told_by_its_error_or_its_end(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {
        (2, "error: no rows\nleaked semaphores\n"): "^no rows$",
        (-9, "[warning] row skipped\n"): r"^rendering algorithm\.demonstrations\.data ended with SIGKILL: \[warning",
        (1, ""): "ended with exit code 1$",
    }
    for (code, said), words in ends.items():
        done = mock.Mock(returncode=code, stderr=said)
        monkeypatch.setattr("launcher.demonstrations.render.subprocess.run", mock.Mock(return_value=done))
        with pytest.raises(UserError, match=words):
            render_for_run(mixing(tokenizer), mock.Mock())


def mixing(tokenizer: Path) -> Config:
    return run_of(tokenizer, algorithm={"demonstrations": {"data": str(tokenizer.parent / "rows.jsonl")}})


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


class Trainings:
    """Stands in for ranks and for engines, and notes up to which step the first train and what the others answer."""

    def __init__(self, config: Config, broken: int | None = None) -> None:
        self.config, self.broken = config, broken
        self.done: list[tuple[str, int]] = []

    def launch(self, ranks: int, arguments: list[str], *_: Any) -> int:
        until = int(arguments[arguments.index("--until") + 1])
        self.done.append(("trained", until))
        with_checkpoint(self.config, until)
        return 0

    def answer(self, model: str, output: Path) -> dict[str, float]:
        step = int(output.name.partition("-")[0])
        self.done.append(("answered", step))
        if step == self.broken:
            raise EndedEarly("stopped", 130)
        return {"reward": step / 8, "accuracy": 0.5}


def trained(config: Config, monkeypatch: pytest.MonkeyPatch, broken: int | None = None) -> list[tuple[str, int]]:
    trainings = Trainings(config, broken)
    monkeypatch.setattr("learner.ranks.launch.launch", trainings.launch)
    try:
        train(config, 1, mock.Mock(), answer=trainings.answer)
    except EndedEarly as early:
        trainings.done.append((str(early), early.code))
    return trainings.done


def evaluated_config(tokenizer: Path, epochs: float, **evaluation: Any) -> Config:
    rows(tokenizer.parent / "rows.jsonl", 20)
    model(tokenizer, 0)
    config = config_of(tokenizer, {"log_to": []}, epochs=epochs)
    return config.model_copy(update={"eval": config.eval.model_copy(update=evaluation)})


def test_each_due_step_is_evaluated_once_before_training_goes_on(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = evaluated_config(tokenizer, 1, every=2), tokenizer.parent / "runs" / "sft"
    ended = "the evaluation of step {} ended early (stopped); the same configuration continues it"
    assert trained(config, monkeypatch, broken=0) == [("answered", 0), (ended.format(0), 130)]
    before = [("answered", 0), ("trained", 2), ("answered", 2), ("trained", 4), ("answered", 4)]
    assert trained(config, monkeypatch, broken=4) == [*before, (ended.format(4), 130)]
    assert held_out(folder) == {0: 0.0, 2: 0.25}
    assert trained(config, monkeypatch) == [("answered", 4), ("trained", 5), ("answered", 5)]
    assert trained(config, monkeypatch) == []
    assert held_out(folder) == {0: 0.0, 2: 0.25, 4: 0.5, 5: 0.625}
    # Those of steps whose checkpoints are gone are not evaluated later.
    longer = evaluated_config(tokenizer, 2, every=1)
    assert trained(longer, monkeypatch)[:2] == [("trained", 6), ("answered", 6)]


def test_without_intermediate_evaluations_training_is_not_interrupted(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = evaluated_config(tokenizer, 1, every=0, before_training=False)
    assert trained(config, monkeypatch) == [("trained", 5), ("answered", 5)]


def test_evaluations_need_prompts_and_exports(tokenizer: Path) -> None:
    config = config_of(tokenizer, learner={"export": False})
    with pytest.raises(UserError, match=r"--eval needs held-out prompts: set data\.heldout"):
        answering(config, None)
    with_prompts = config.model_copy(update={"data": config.data.model_copy(update={"heldout": "heldout.jsonl"})})
    with pytest.raises(UserError, match=r"learner\.export is false"):
        answering(with_prompts, None)
