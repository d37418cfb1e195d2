"""Evaluates a model on held-out prompts: the work of `spo eval` and of `spo.evaluate`."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.config import Config
from common.config.data import DataSource, source_name
from common.errors import UserError
from common.model import check_model_folder, exported_model
from launcher.evaluate.answer_run import UNSEEN, AnswerScreen, answer
from launcher.run.processes import EMBEDDED
from launcher.run.supervisor import EndedEarly
from sampler.evaluation_metrics import Response, summarize_groups
from sampler.files.answer_file import Request, read_answers

NAME = re.compile(r"[A-Za-z0-9._-]+")  # of a data set


def evaluate(
    model: str,
    config: Config,
    *,
    data: Sequence[str] = (),
    samples: int | None = None,
    output: Path | None = None,
    generators: int | None = None,
    redis: str = EMBEDDED,
    screen: AnswerScreen = UNSEEN,
) -> dict[str, float]:
    """Answer every held-out prompt, and compute the figures; see `spo.evaluate`."""
    if output is not None and output.suffix != ".jsonl":
        raise UserError(f"--output {output} must be a file *.jsonl: responses are written as JSON lines")
    if samples is not None and samples < 1:
        raise UserError(f"--samples {samples} must be at least 1")
    config = _with_data(config, data)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model_path(model)})})
    temporary = None if output else Path(tempfile.mkdtemp(prefix="spo-eval-"))
    file = output or Path(str(temporary)) / "answers.jsonl"
    k = samples or config.eval.samples
    try:
        count = answer(config, Request("eval", k, file), generators=generators, redis=redis, screen=screen)
    except UserError:
        if temporary is not None:
            shutil.rmtree(temporary)
        raise
    except EndedEarly as early:
        if temporary is not None:
            early.add_note(f"--output {file} continues from here")
        raise
    figures = answer_figures(read_answers(file), count.wanted - count.answered, k, config.right_from)
    if temporary is not None:
        shutil.rmtree(temporary)
    return figures


def answer_figures(rows: Iterable[dict[str, Any]], missing: int, samples: int, right_from: float) -> dict[str, float]:
    """Figures over all answers, over each data set if there are several, and over each value of `eval.by_column`.

    Args:
        missing: answers that were skipped.
        samples: answers to each prompt.
    """
    responses, groups = [], []
    for row in rows:
        # The same prompt may be in two data sets.
        prompt = f"{row['source']}/{row['prompt_id']}"
        responses.append(Response(prompt, float(row["score"]), str(row["answer"])))
        groups.append([str(name) for name in row["groups"]])
    return summarize_groups(responses, groups, samples, right_from) | {"set_aside": float(missing)}


def model_path(model: str) -> str:
    """The model folder that MODEL names, which for a run or a checkpoint is an export; raises `UserError`."""
    path = exported_model(model, "MODEL")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"MODEL {model} is neither a model folder (config.json) nor a checkpoint with an export (hf/config.json); "
            "learner.export=true writes exports"
        )
    check_model_folder(path)
    return path


def _with_data(config: Config, data: Sequence[str]) -> Config:
    """The configuration with the held-out sets of the command line; a known NAME keeps its settings except the path."""
    if not data:
        if config.data.heldout is None:
            raise UserError("there are no held-out prompts: give --data, or set data.heldout")
        return config
    configured = config.data.heldout if isinstance(config.data.heldout, list) else []
    by_name = {source_name(item): item for item in configured}
    sources = []
    for text in data:
        name, _, path = text.partition("=")
        if not path or not NAME.fullmatch(name):  # a path may have a "=" too
            sources.append(DataSource(path=text))
        else:
            sources.append(by_name.get(name, DataSource(path=path)).model_copy(update={"path": path, "name": name}))
    names = [source_name(source) for source in sources]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--data names {twice[0]!r} twice; give names, as in --data a={sources[0].path}")
    return config.model_copy(update={"data": config.data.model_copy(update={"heldout": sources})})
