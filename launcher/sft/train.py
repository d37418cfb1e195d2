"""Supervised training from rows to a checkpoint, and its evaluations: the work of `spo sft` and of `spo.sft`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checks.computing import visible_gpus
from common.config import Config, dump_config
from common.config.combinations import check_ranks
from common.config.load import parse_yaml, read_values
from common.errors import UserError
from common.files import checkpoint, checkpoint_versions, rewrite
from common.model import check_model_folder, exported_model, weights_fingerprint
from launcher.demonstrations.render import render
from launcher.evaluate.answer_run import UNSEEN, AnswerScreen
from launcher.evaluate.evaluation import evaluate
from launcher.model_card import held_out
from launcher.run.folder_lock import locked
from launcher.run.supervisor import INTERRUPTED, EndedEarly
from launcher.sft.rank import UNFINISHED, StepMetrics, train_here
from launcher.sft.settings import supervised, with_steps
from learner.batch.demonstrations import Demonstrations, folder_of

# Keys of the section that may change when training continues; the demonstrations are in the run folder.
SECTIONS = ("run", "model", "sft")
MAY_CHANGE = ("epochs", "steps", "learner", "heldout")

# Answers the held-out prompts with a model, in a file that takes the answers; returns the figures.
Answer = Callable[[str, Path], dict[str, float]]


def answering(run: Config, generators: int | None, screen: AnswerScreen = UNSEEN) -> Answer:
    """A function that answers held-out prompts as `spo eval` does, with processes that end afterwards.

    Raises:
        UserError: there are no held-out prompts, or checkpoints have no export that could answer them.
    """
    if run.data.heldout is None:
        raise UserError("--eval needs held-out prompts: set data.heldout")
    if not supervised(run).learner.export:
        raise UserError("--eval answers with the exports of checkpoints, and learner.export is false: set it to true")
    return lambda model, output: evaluate(model, run, output=output, generators=generators, screen=screen)


def train(run: Config, ranks: int, log: Any, *, here: bool = False, answer: Answer | None = None) -> Path:
    """Train on the demonstrations of `run.sft`, from the newest checkpoint on; returns the last one's folder.

    Args:
        run: the configuration of the run that comes after.
        ranks: number of ranks on this machine, each with its own GPU; 0 means one for each GPU.
        here: train a single rank in this process instead of a child process.
        answer: evaluates the model before training, every `eval.every` steps and at the end. The training process ends
            before each evaluation, so that its memory is free.

    Raises:
        UserError: the model, the demonstrations or the run folder cannot be used, or training diverges.
        EndedEarly: a signal stopped it after a checkpoint, or a rank failed.
    """
    config = supervised(run)
    if ranks < 0:
        raise UserError(f"--ranks {ranks} must be at least 0")
    ranks = ranks or max(1, visible_gpus(dict(os.environ)).count)
    check_ranks(config, ranks)
    check_model_folder(config.model.path, tokenizer=True)
    folder = config.run.folder
    with locked(folder, "sft.experiment or run.output_dir"):
        config = prepare(config, log)
        if _newest(folder) >= config.run.steps:
            log.info("trained already; for more, raise sft.epochs or sft.steps", steps=config.run.steps)
        for step in [config.run.steps] if answer is None else _evaluated_steps(config):
            if step > _newest(folder):
                # With evaluations, training is a child process, which frees its memory before each of them.
                _train(config, ranks, log, here and answer is None, step)
            if answer is not None:
                _evaluate(config, step, answer, log)
    return checkpoint(folder, _newest(folder))


def _newest(folder: Path) -> int:
    return max(checkpoint_versions(folder), default=0)


def _evaluated_steps(config: Config) -> list[int]:
    every, last = config.eval.every, config.run.steps
    between = range(every, last, every) if every else ()
    return [*([0] if config.eval.before_training else []), *between, last]


def _evaluate(config: Config, step: int, answer: Answer, log: Any) -> None:
    """Evaluate a step's model, unless that is done, or its checkpoint was removed."""
    folder = config.run.folder
    if step in held_out(folder) or step not in (0, *checkpoint_versions(folder)):
        return
    model = exported_model(str(checkpoint(folder, step))) if step else config.model.path
    # The name has the weights' fingerprint, so that answers of other weights are not continued.
    name = f"{step}-{weights_fingerprint(model).replace('/', '--')}.jsonl"
    try:
        figures = answer(model, folder / "evaluations" / name)
    except EndedEarly as early:
        reason = f"the evaluation of step {step} ended early ({early}); the same configuration continues it"
        raise EndedEarly(reason, early.code) from None
    log.info("evaluated", step=step, **{name: value for name, value in figures.items() if "/" not in name})
    metrics = StepMetrics(config, log)
    metrics.open(_newest(folder))
    metrics.evaluated(step, figures)
    metrics.close()


def prepare(config: Config, log: Any) -> Config:
    """Render the demonstrations into the run folder, and write the configuration there; returns it, with `run.steps`.

    Without a checkpoint, training begins anew, with new metrics; with one, they are not rendered again.

    Raises:
        UserError: no demonstration can be used, or the run folder is that of another training.
    """
    folder, train = config.run.folder, folder_of(config, "train")
    _check_folder(config, train)
    if not checkpoint_versions(folder):
        # First, since a configuration without demonstrations would be that of another run.
        (folder / "config.yaml").unlink(missing_ok=True)
        for left in (train.parent, folder / "trackers"):
            shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob("metrics*.jsonl"):
            left.unlink()
        if config.sft.data is None:
            raise UserError("sft.data is missing: name the demonstrations, *.jsonl for example")
        render(config, config.sft.data, "sft.data", "train", train, log)
        if config.sft.heldout is not None:
            render(config, config.sft.heldout, "sft.heldout", "test", folder_of(config, "heldout"), log)
    rows = Demonstrations.open(train)
    config = with_steps(config, len(rows))
    sizes = {"rows": len(rows), "tokens": rows.tokens, "trained_on": rows.trained_tokens}
    log.info("demonstrations", **sizes, steps=config.run.steps)
    rewrite(folder / "config.yaml", [dump_config(config, absolute=True).encode()])
    return config


def _check_folder(config: Config, train: Path) -> None:
    """Raise `UserError` if the run folder is that of a run, or of training with other settings."""
    folder, existing = config.run.folder, config.run.folder / "config.yaml"
    if not existing.exists():
        return
    if not train.exists():
        raise UserError(f"{folder} is the folder of another run; choose another sft.experiment")
    if not checkpoint_versions(folder):
        return
    before, now = _fixed(read_values(existing)), _fixed(parse_yaml(dump_config(config, absolute=True)))
    for key, value in now.items():
        if before.get(key) != value:
            raise UserError(
                f"{folder} was trained with {key} = {before.get(key)!r}, and it is {value!r} now: continue with its "
                "value, or choose another sft.experiment"
            )


def _fixed(values: dict[str, Any]) -> dict[str, Any]:
    """What must not change when training continues, by key."""
    run, model, sft = (section if isinstance(section := values.get(name), dict) else {} for name in SECTIONS)
    own = {f"sft.{key}": value for key, value in sft.items() if key not in MAY_CHANGE}
    return own | {"run.seed": run.get("seed"), "model.path": model.get("path")}


def _train(config: Config, ranks: int, log: Any, here: bool, until: int) -> None:
    """Train on this many ranks up to a step; raises `EndedEarly` if it was not reached."""
    folder = config.run.folder
    if ranks == 1 and here:
        code = 0 if train_here(config, log, until=until) else UNFINISHED
    else:
        from learner.ranks.launch import launch  # imports torch

        options = ["--config", str(folder / "config.yaml"), "--until", str(until)]
        code = launch(ranks, options, UNFINISHED, "launcher.sft.rank")
    if code == UNFINISHED:
        raise EndedEarly(f"stopped; the same configuration continues from step {_newest(folder)}", INTERRUPTED)
    if code != 0:
        raise EndedEarly(f"a rank ended with exit code {code}; the reason is on its stderr", code)
