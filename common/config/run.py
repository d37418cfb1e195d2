"""The whole configuration of a run, one pydantic model per section. Imports neither torch nor vllm.

A field marked `local` describes the machine a process runs on, not the run: processes of one run may
differ in it. Every other field must agree between all processes of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config.algorithm import AlgorithmConfig
from common.config.critic import CriticConfig
from common.config.data import DataConfig, Source
from common.config.generator import EpisodeConfig, GeneratorConfig, SandboxConfig
from common.config.learner import LearnerConfig
from common.config.sampler import EvalConfig, SamplerConfig
from common.config.section import NUMBERS_AS_TEXT, Section, local
from common.config.sft import SftConfig
from common.config.teacher import TeacherConfig

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
# Implied by methods that do not use the tracked values: they need no selection and no forward pass for drift.
WITHOUT_BASELINE = {"sampler": {"drift": {"mode": "constant"}, "selection": {"criterion": "uniform"}}}
# Implied by `run.deterministic`: one task at a time, and each batch sampled by the weights that it trains.
SERIAL = {"sampler": {"max_staleness": 0}, "generator": {"max_concurrency": 1}}


class RunConfig(Section):
    """The run's name, how long it lasts and where its files go."""

    name: str = Field("spo", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; prefix of its Redis keys.")
    experiment: str = Field("default", description="Folder under `output_dir` that holds the run's files.")
    output_dir: str = local("runs", description="Where run folders are made.")
    modules: str | None = local(
        None,
        description="Folder of your own modules, for names of the form `module:object`; searched after "
        "installed packages. null: the folder of the YAML file.",
    )
    learner_gpus: Annotated[str | None, NUMBERS_AS_TEXT] = local(
        None,
        description="GPUs of the learner under `spo run`, one rank on each, in torch's numbering: `0-3` or `0,2`. "
        "null: half of them, or the nearest number with which it fits (docs/gpu.md).",
    )
    generator_gpus: Annotated[str | None, NUMBERS_AS_TEXT] = local(
        None,
        description="GPUs of the generators under `spo run`; each generator takes as many as `generator.engine` "
        "requires. null: the others.",
    )
    teacher_gpus: Annotated[str | None, NUMBERS_AS_TEXT] = local(
        None,
        description="GPUs of the teachers under `spo run`; each server takes as many as `teacher.engine` requires. "
        "null: the last ones.",
    )
    steps: int = Field(
        100,
        ge=0,
        description="Learner steps (batches, and so weight versions) until the run ends; 0: there is no learner, and "
        "generators answer `spo values estimate` and `spo eval` with the model as it is.",
    )
    stop_when: int | None = Field(
        None,
        ge=1,
        description="Early stopping: number of evaluations in a row without a higher mean held-out reward, after which "
        "the run ends before `run.steps` (docs/operations.md); null: it does not.",
    )
    seed: int = Field(0, ge=0, description="Seed of prompt selection, sampling and initialisation.")
    deterministic: bool = Field(
        False,
        description="Run one task after the other, so that a run gives the same result bit for bit when it is "
        "repeated, or killed and continued (docs/operations.md); implies `sampler.max_staleness: 0` and "
        "`generator.max_concurrency: 1`.",
    )
    journal: bool = Field(
        False, description="Keep every commit of the sampler in Redis, for `spo audit`; `spo chaos` switches it on."
    )
    log_to: list[TrackerName] = Field(
        ["tensorboard"],
        description="Trackers to which `metrics.jsonl` is copied (docs/metrics.md): `tensorboard`, `wandb`, `mlflow`, "
        "`trackio`.",
    )
    keep_mb: int = Field(
        4096,
        ge=1,
        description="Size of each of `rollouts/`, `validation_data/` and `training_data/` in MiB, beyond which files "
        "of the oldest weight versions are removed; those of the newest version and of the first evaluation stay. "
        "`metrics.jsonl` with `metrics.old.jsonl` may take a sixteenth of it, and so may each process's files in "
        "`tensorboard/`.",
    )

    @property
    def keep_bytes(self) -> int:
        return self.keep_mb << 20

    @property
    def metrics_bytes(self) -> int:
        """Bytes that metrics may take, in `metrics.jsonl` and in each process's files for TensorBoard."""
        return max(1 << 20, self.keep_mb << 16)

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.experiment

    @property
    def has_learner(self) -> bool:
        return self.steps > 0


class ModelConfig(Section):
    """The policy: any `transformers` causal language model."""

    path: str = Field(
        ...,
        description="Model folder, Hugging Face name, or run folder (its newest export is taken); the learner and vLLM "
        "load the same. Of a multimodal model the language part is trained and served, and exports have the other "
        "parts unchanged.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Type in which generators compute and weights are sent."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Type in which engine and learner compute logits from the last hidden state; `model`: that of the "
        "weights. bfloat16 rounds logits between 16 and 32 to multiples of 0.125, differently on each side "
        "(docs/gpu.md).",
    )
    max_model_len: int = Field(4096, ge=8, description="Longest prompt and response together, in tokens.")
    trust_remote_code: bool = Field(False, description="Let the model folder bring its own Python code.")


class BrokerConfig(Section):
    """The Redis server between the processes."""

    url: str = local(
        "redis://127.0.0.1:6379/0",
        description="`redis://`, `rediss://`, `unix://`, or `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB` "
        "(`rediss+sentinel://` with TLS).",
    )
    password_file: str | None = local(None, description="File with the server's password, in place of one in `url`.")
    wait: float = local(60.0, ge=0, description="Seconds to wait for the server.")
    dead_after: float = Field(
        10.0,
        gt=0,
        description="Seconds without a heartbeat after which others take over; a process sends one every tenth of this "
        "time, and at least every second.",
    )

    @property
    def heartbeat(self) -> float:
        """Seconds between heartbeats."""
        return min(1.0, self.dead_after / 10)


class Config(Section):
    """A run's checked configuration: an attribute for each section, which has an attribute for each key."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    sampler: SamplerConfig = SamplerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    sft: SftConfig = SftConfig()
    episode: EpisodeConfig = EpisodeConfig()
    teacher: TeacherConfig = TeacherConfig()
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig = EvalConfig()
    broker: BrokerConfig = BrokerConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Add the values that other settings imply, where none are given."""
        if not isinstance(data, Mapping):
            return data
        if _value(data, "algorithm", "method") not in (None, "spo"):
            data = _beneath(data, WITHOUT_BASELINE)
        if _value(data, "run", "deterministic") is True:
            data = _beneath(data, SERIAL)
        return data

    def for_source(self, source: Source) -> Config:
        """The configuration for the tasks of a source: its episodes and teacher, its columns and settings of prompts.

        Raises:
            UserError: a key or a value of the source's `episode` or `teacher` is wrong; the message names the source.
        """
        own = ("prompt_column", "answer_column", "system_prompt", "prompt_markup", "template_options")
        data = self.data.model_copy(update={key: getattr(source, key) for key in own})
        episode = self.episode.with_changes(source.episode, source.key)
        teacher = self.teacher.with_changes(source.teacher, source.key)
        return self.model_copy(update={"episode": episode, "teacher": teacher, "data": data})

    @property
    def right_from(self) -> float:
        """The reward from which a held-out response counts as right."""
        right_from = self.eval.right_from
        return self.sampler.tracker.reward_range[1] if right_from is None else right_from

    def episodes_in_use(self) -> dict[str, EpisodeConfig]:
        """The distinct episode sections of all sources, each by the key of its first source."""
        episodes: dict[str, EpisodeConfig] = {}
        for source in self.data.all_sources():
            episode = self.episode.with_changes(source.episode, source.key)
            if episode not in episodes.values():
                episodes["episode" if episode is self.episode else f"{source.key}.episode"] = episode
        return episodes

    @property
    def uses_containers(self) -> bool:
        return any(episode.agent and episode.agent.image for episode in self.episodes_in_use().values())

    def teachers_in_use(self) -> dict[str, TeacherConfig]:
        """The distinct teachers of the training data, each by the name of the first source that has it."""
        teachers: dict[str, TeacherConfig] = {}
        for source in self.data.sources("train"):
            teacher = self.teacher.with_changes(source.teacher, source.key)
            if teacher.is_set and teacher not in teachers.values():
                teachers[source.name] = teacher
        return teachers

    def served_teachers(self) -> dict[str, TeacherConfig]:
        """Those of `teachers_in_use` that `spo run` serves."""
        teachers = self.teachers_in_use() if self.run.has_learner else {}
        return {name: teacher for name, teacher in teachers.items() if teacher.model is not None}

    def teacher_socket(self, name: str) -> Path:
        """Where `spo run` serves a teacher, by its name in `served_teachers`; only its own account can connect."""
        return self.run.folder / "teachers" / f"{list(self.served_teachers()).index(name)}.sock"


def _value(tree: Mapping[str, Any], section: str, key: str) -> Any:
    values = tree.get(section)
    return values.get(key) if isinstance(values, Mapping) else getattr(values, key, None)


def _beneath(values: Mapping[str, Any], implied: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values`, completed from `implied` where they have no value."""
    merged = {**implied, **values}
    for key in implied.keys() & values.keys():
        if isinstance(implied[key], Mapping) and isinstance(values[key], Mapping):
            merged[key] = _beneath(values[key], implied[key])
    return merged
