"""SPO from Python: start runs, read them, evaluate and export their models, in scripts and notebooks.

Importing this package imports neither torch nor vLLM; each function imports what it needs when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.config import Config
    from common.errors import UserError
    from launcher.recorded import RecordedRun
    from launcher.run.started import StartedRun
    from launcher.run.summary import Summary
    from launcher.run.supervisor import EndedEarly

# These names follow semantic versioning, and docs/python.md lists them.
__all__ = [
    "Config", "EndedEarly", "RecordedRun", "StartedRun", "Summary", "UserError", "config", "doctor", "evaluate",
    "export", "load", "run", "sft",
]  # fmt: skip

_CLASSES = {
    "Config": "common.config",
    "EndedEarly": "launcher.run.supervisor",
    "RecordedRun": "launcher.recorded",
    "StartedRun": "launcher.run.started",
    "Summary": "launcher.run.summary",
    "UserError": "common.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'spo' has no attribute {name!r}")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def run(
    config: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    generators: int | None = None,
    learner_gpus: str | None = None,
    generator_gpus: str | None = None,
    teacher_gpus: str | None = None,
    redis: str = "embedded",
    resume: bool = False,
) -> StartedRun:
    """Start a run on this machine, supervised as by `spo run`, and return while it runs.

    The configuration is checked first, which takes seconds. A stopped run continues when it is started again with the
    same configuration. The run's log is `logs/launcher.log` in the run folder. From then on, files that this process
    creates, like the run's own, can be read only by your account and its group (umask 027).

    Args:
        config: the YAML file, or a configuration that `spo.config` returned.
        overrides: values by key, such as `{"run.steps": 5}`; a section may be given as a dict.
        generators: generator processes; by default as GPUs and cores allow.
        learner_gpus: GPUs of the learner, such as "0-3"; by default half of them.
        generator_gpus: GPUs of the generators; by default the others.
        teacher_gpus: GPUs of the teachers' servers; by default the last ones.
        redis: "embedded" starts a server for this run; or the address of a running one.
        resume: continue from the newest checkpoint if Redis has lost the run.

    Returns:
        The run; iterating over it yields each step's metrics.

    Raises:
        UserError: the configuration cannot be used, a check failed, or the run folder is in use, for example by the
            same run in this notebook. What a process refuses later is raised by `StartedRun.wait`.

    Example:
        import spo

        with spo.run("maths.yaml", {"run.steps": 100}) as run:
            for step in run:
                print(step["step"], step["reward/mean"])
    """
    from launcher.checks.start import check_before_start
    from launcher.layout.layout import Choice
    from launcher.run.local_run import RunOptions
    from launcher.run.screen import start_unseen

    choice = Choice(generators, learner_gpus, generator_gpus, teacher_gpus)
    return start_unseen(_resolved(config, overrides), RunOptions(choice, redis, resume, check=check_before_start))


def sft(
    config: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    ranks: int = 0,
    evaluate: bool = False,
    generators: int | None = None,
) -> Path:
    """Train a model on demonstrations, as `spo sft` does, and return when it is trained.

    Training that was stopped continues. The ranks are processes of their own, which write their progress to stderr and
    to the run folder, `sft.experiment` under `run.output_dir`; `load` opens it.

    Args:
        config: the YAML file, whose section `sft` names the demonstrations, or a configuration.
        overrides: values by key, such as `{"sft.epochs": 2}`.
        ranks: number of ranks on this machine, each on a GPU of its own; 0: one for each GPU.
        evaluate: answer `data.heldout` before training, every `eval.every` steps and at the end; the metrics then have
            the held-out reward under the names that it has in a run.
        generators: generator processes of evaluations; by default as GPUs and cores allow.

    Returns:
        The folder of the last checkpoint. The run folder, too, can be the `model.path` of a run.

    Raises:
        UserError: the configuration, the model, the demonstrations or the run folder cannot be used.
        EndedEarly: a rank or an evaluation failed, or a signal stopped the training after a checkpoint.

    Example:
        spo.sft("maths.yaml", {"sft.data": "demonstrations.jsonl"})
        run = spo.run("maths.yaml", {"model.path": "runs/sft"})
    """
    from common import log as logs
    from launcher.run.screen import logs_folder
    from launcher.sft.settings import supervised
    from launcher.sft.train import answering, train

    run = _resolved(config, overrides)
    answer = answering(run, generators) if evaluate else None
    folder = logs_folder(supervised(run).run.folder)
    return train(run, ranks, logs.to_file("launcher", folder / "launcher.log"), answer=answer)


def load(folder: str | Path) -> RecordedRun:
    """Open a run folder, of a run that is over or under way.

    Args:
        folder: the run folder, or the `config.yaml` in it.

    Raises:
        UserError: it is not a run folder; the message names the nearest one.

    Example:
        import pandas

        run = spo.load("runs/maths")
        pandas.DataFrame(run.metrics()).plot("step", "reward/mean")
        wrong = run.episodes(kind="eval", reward="<1", limit=10)
    """
    from launcher.recorded import RecordedRun

    return RecordedRun(folder)


def evaluate(
    model: str | Path,
    config: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    data: Sequence[str] = (),
    samples: int | None = None,
    output: str | Path | None = None,
    generators: int | None = None,
    redis: str = "embedded",
) -> dict[str, float]:
    """Answer held-out prompts with a model, as `spo eval` does, and return when all are answered.

    Args:
        model: a model folder, a Hugging Face name, or a checkpoint folder of a run.
        config: the YAML file with data columns, episode and reward, or a configuration.
        overrides: values by key.
        data: data sets, each as `PATH` or `NAME=PATH`; by default `data.heldout`.
        samples: responses to each prompt; by default `eval.samples`.
        output: a file `*.jsonl` that keeps the responses; a later call with it continues after an interrupt.
        generators: generator processes; by default as GPUs and cores allow.
        redis: "embedded", or the address of a server where generators of other machines may join.

    Returns:
        The figures by name, such as `accuracy`, `reward`, `avg@8` and `pass@8`. With several data sets, the names of a
        data set's figures begin with its name. `set_aside` is the number of tasks that could not be answered and were
        skipped.

    Raises:
        UserError: the model, the configuration or the data cannot be used.
        EndedEarly: a process failed too often, or the call was interrupted.

    Example:
        figures = spo.evaluate("runs/maths/checkpoints/step_100", "maths.yaml", samples=8)
        print(figures["pass@8"])
    """
    from launcher.evaluate.evaluation import evaluate

    file = None if output is None else Path(output)
    sets = (data,) if isinstance(data, str) else data
    return evaluate(
        str(model), _resolved(config, overrides), data=sets, samples=samples, output=file, generators=generators,
        redis=redis,
    )  # fmt: skip


def export(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    adapter: bool = False,
    card: bool = False,
) -> int:
    """Write a checkpoint's model in the format that transformers and vLLM read, as `spo export` does.

    Args:
        run: the run folder; the run may be under way.
        output: the folder for the model, new or empty.
        step: the checkpoint's step; by default the newest.
        best: take the checkpoint with the highest held-out reward instead.
        adapter: write only the adapter, for peft; needs a run with `learner.lora`.
        card: also write a model card, README.md, with the run's figures.

    Returns:
        The checkpoint's step.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the folder cannot be written.

    Example:
        step = spo.export("runs/maths", "maths-model")
    """
    from launcher.checkpoints import write_export

    return write_export(Path(run), Path(output), step, best=best, adapter=adapter, card=card)


def doctor(
    config: str | Path | Config | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    role: str | None = None,
    redis: str | None = None,
) -> list[dict[str, Any]]:
    """Look for problems that would keep a run from starting, as `spo doctor` does.

    With a configuration it also tries what a start does, except loading weights.

    Args:
        config: the YAML file, or a configuration; without it only the machine is checked.
        overrides: values by key.
        role: check only what this process needs: "sampler", "generator", "learner", "relay" or "sandbox".
        redis: the value that you will pass to `run`; by default `broker.url` if that is set or a role is given,
            otherwise "embedded".

    Returns:
        A row for each finding: `check`, `level` ("ok", "warning" or "problem"), `line`, which also says how to fix it,
        and `roles`.

    Raises:
        UserError: the configuration cannot be read.

    Example:
        problems = [row["line"] for row in spo.doctor("maths.yaml") if row["level"] == "problem"]
    """
    from common.errors import UserError
    from common.process import Role
    from launcher.checks.command import diagnose, finding_rows

    if role is not None and role not in list(Role):
        raise UserError(f"role {role!r} is unknown; allowed: {', '.join(Role)}")
    settings = None if config is None else _resolved(config, overrides)
    return finding_rows(diagnose(settings, None if role is None else Role(role), redis))


def config(path: str | Path | Config, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read and check a configuration: the file, then `SPO__SECTION__KEY` in the environment, then the overrides.

    Args:
        path: the YAML file; or a configuration, of which the overrides change some values.
        overrides: values by key, such as `{"learner.lr": 1e-6}`; a section may be given as a dict.

    Returns:
        The configuration, with a value for each key of [configuration.md](configuration.md); it does not change.

    Raises:
        UserError: the file cannot be read, a key is unknown or mistyped, or values cannot work together.

    Example:
        config = spo.config("maths.yaml", {"sampler.batch_size": 256})
        print(config.sampler.batch_size, config.run.folder)
    """
    return _resolved(path, overrides)


def _resolved(source: str | Path | Config, overrides: Mapping[str, Any] | None) -> Config:
    from common.config import Config, changed_config, load_config

    if isinstance(source, Config):
        return changed_config(source, overrides or {})
    return load_config(source, overrides or {})
