"""The run's configuration: one pydantic model a section. Imports neither torch nor vllm.

A field marked `local` describes the machine a process runs on, not the run: processes of one run may
differ in it. Every other field must agree between all processes of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config.algorithm import AlgorithmConfig
from common.config.data import DataConfig
from common.config.episode import EpisodeConfig
from common.config.generator import GeneratorConfig
from common.config.implied import fill_in
from common.config.lora import LoraConfig
from common.config.section import LOCAL, ON_OFF, Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class RunConfig(Section):
    """What the run is called, how long it lasts and where its files go."""

    name: str = Field("spo", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; prefix of its Redis keys.")
    experiment: str = Field("default", description="Folder under `output_dir` that holds the run's files.")
    output_dir: str = Field("runs", description="Where run folders are made.", json_schema_extra=LOCAL)
    modules: str | None = Field(
        None,
        description="Folder of your own modules, those that `module:object` names, after all that is installed; null: "
        "that of the YAML file.",
        json_schema_extra=LOCAL,
    )
    steps: int = Field(
        100,
        ge=0,
        description="Learner steps (batches, and so weight versions) until the run ends; 0: there is no learner, and "
        "generators answer `spo values estimate` and `spo eval` with `model.path` as it is.",
    )
    seed: int = Field(0, ge=0, description="Seed of prompt selection, sampling and initialisation.")
    deterministic: bool = Field(
        False,
        description="Play a serial schedule, one task after the other, whose result is the same bit for bit when it is "
        "repeated, or killed and continued (docs/operations.md); implies `sampler.max_staleness: 0` and "
        "`generator.max_concurrency: 1`.",
    )
    journal: bool = Field(
        False, description="Keep every commit of the sampler in Redis, for audits; `spo chaos` switches it on."
    )
    log_to: list[TrackerName] = Field(
        ["tensorboard"],
        description="Trackers that get what `metrics.jsonl` has (docs/metrics.md): `tensorboard`, `wandb`, `mlflow`, "
        "`trackio`.",
    )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output_dir) / self.experiment

    @property
    def has_learner(self) -> bool:
        """Whether anything is trained."""
        return self.steps > 0


class ModelConfig(Section):
    """The policy: any `transformers` causal language model."""

    path: str = Field(..., description="Model folder or Hugging Face name; the learner and vLLM load the same.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Type the generators compute in and the weights are sent in."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Type in which engine and learner compute logits from the last hidden state; `model`: that of the "
        "weights. In bfloat16 logits of 16 to 32 are 0.125 apart, on either side by itself (docs/gpu.md).",
    )
    max_model_len: int = Field(4096, ge=8, description="Longest prompt and response together, in tokens.")
    trust_remote_code: bool = Field(False, description="Let the model folder bring its own Python code.")


class TrackerConfig(Section):
    """The value tracker (SPO, arXiv 2509.13232): how fast old rewards are forgotten."""

    rho_min: float = Field(0.875, gt=0, lt=1, description="Smallest forgetting factor; N_eff is then 8.")
    rho_max: float = Field(0.96, gt=0, lt=1, description="Largest forgetting factor; N_eff is then at most 25.")
    half_life: float = Field(0.06, gt=0, description="Drift D at which old counts lose half their weight.")
    reward_range: tuple[float, float] = Field((0.0, 1.0), description="Range of rewards; rescaled to [0, 1].")
    prior: Literal["population", "paper"] = Field(
        "paper",
        description="What a prompt's own rewards are shrunk towards. `population`: a mean of many prompts, as strongly "
        "as has predicted rewards best so far (docs/algorithms.md); `paper`: 0.5, as if it had been answered once.",
    )
    group_column: str | None = Field(
        None,
        description="Column of the data (a level, a task) by whose values the prior `population` may average rewards; "
        "null: the sources, if `data.train` has several.",
    )
    prompt_features: Literal["ngrams", "none"] = Field(
        "ngrams", description="Whether the prior `population` may use a regression on the n-grams of the prompt's text."
    )


class RunTrackerConfig(TrackerConfig):
    """The value tracker of a run, which differs from the paper's in its prior."""

    prior: Literal["population", "paper"] = Field(
        "population", description=TrackerConfig.model_fields["prior"].description
    )


Criterion = Literal["std", "uniform", "thompson", "posterior"]


class SelectionConfig(Section):
    """Which prompts come next: weight spread / N_eff^gamma + epsilon."""

    criterion: Criterion = Field(
        "std",
        description="The spread. `std`: sqrt(v(1-v)); `posterior`: its expectation under Beta(v N_eff, (1-v) N_eff); "
        "`thompson`: that of a value drawn from it; `uniform`: 1.",
    )
    epsilon: float = Field(0.05, gt=0, description="Weight every prompt keeps, however sure its value.")
    gamma: float = Field(0.0, ge=0, le=1, description="How much well-known prompts are held back; 0: not at all.")


class DriftConfig(Section):
    """How far the policy moved on a prompt since it last answered it."""

    mode: Literal["rescore", "ledger", "constant"] = Field(
        "rescore",
        description="`rescore`: generators score the prompt's previous response again; `ledger`: the learner's "
        "drift per version is summed; `constant`: rho is fixed.",
    )
    estimator: Literal["abs", "k3"] = Field("abs", description="Mean |then - now|, or the k3 estimator of the KL.")
    rho: float = Field(0.9, gt=0, lt=1, description="Forgetting factor of mode `constant`.")


class AdvantageConfig(Section):
    """From raw advantages r - v to what the learner multiplies with."""

    token_weighted: bool = Field(False, description="z-score weighted by model tokens (SPO++, arXiv 2608.24870).")
    baseline: Literal["arrival", "dispatch"] = Field(
        "arrival",
        description="Value read when the reward is counted, or frozen when the task was dispatched.",
    )


class SamplerConfig(Section):
    """Batches, admission and the value tracker."""

    batch_size: int = Field(128, ge=1, description="Samples a learner step trains on.")
    max_staleness: int = Field(4, ge=0, description="Most versions between a sample's oldest token and its batch.")
    max_set_aside: int | None = Field(
        None,
        ge=1,
        description="When more tasks in a row were set aside, with no answer between them, the run stops with the last "
        "one's reason; null: as many as may be outstanding, (max_staleness + 1) * batch_size, and 64 at least.",
    )
    initial_values: str | None = Field(
        None,
        description="Scores to start the tracker from: JSON {prompt text: [scores]}, or `.jsonl` of scored responses, "
        "`input` and `score` each, the SPO recipe's among them.",
    )
    tracker: RunTrackerConfig = RunTrackerConfig()
    selection: SelectionConfig = SelectionConfig()
    drift: DriftConfig = DriftConfig()
    advantage: AdvantageConfig = AdvantageConfig()


Deltas = Annotated[Literal["auto", "on", "off"], ON_OFF]


class WeightsConfig(Section):
    """The socket that serves weights."""

    bind: str = Field(
        "tcp://127.0.0.1:*", description="Address the learner serves weights on.", json_schema_extra=LOCAL
    )
    advertise: str | None = Field(
        None,
        description="Address generators connect to, where it is not the bound one.",
        json_schema_extra=LOCAL,
    )
    curve_dir: str | None = Field(
        None,
        description="Folder with CURVE keys (`server.key`, `server.key_secret`, `client.key`, `client.key_secret`).",
        json_schema_extra=LOCAL,
    )
    chunk_mib: int = Field(8, ge=1, description="Size of one chunk in MiB.")
    credit: int = Field(8, ge=1, description="Chunks a generator asks for ahead.")
    deltas: Deltas = Field(
        "auto",
        description="Whether weights are pulled as what has changed since the version before, without loss: `auto`: "
        "from other machines; `on`: from this one too, instead of through shared memory; "
        "`off`: always whole. Of the learner, `off`: it makes none.",
        json_schema_extra=LOCAL,
    )
    shared_folder: Annotated[str, ON_OFF] = Field(
        "auto",
        pattern="^(auto|off|/.*)$",
        description="Folder with Unix sockets, through which processes of one machine hand each other weights in "
        "shared memory: `auto`: one of this account in /dev/shm; in containers, a volume that they share; `off`: "
        "weights always go over the weight socket.",
        json_schema_extra=LOCAL,
    )
    relay: str = Field(
        "auto",
        description="What generators pull through: `auto`: a relay (`spo-relay`) on their machine while one is alive, "
        "else the learner; `direct`: always the learner; `tcp://host:port`: that relay, or the learner while it fails.",
        json_schema_extra=LOCAL,
    )
    host: str | None = Field(
        None,
        description="What this machine is called where relays and generators find each other; null: its host name. "
        "In containers, whose host names differ, the name of their node.",
        json_schema_extra=LOCAL,
    )


class LearnerConfig(Section):
    """Optimizer, memory and checkpoints."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps until the learning rate is at its peak.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate over the peak (linear, cosine).")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW betas.")
    grad_clip: float = Field(1.0, ge=0, description="Global gradient norm is clipped to this; 0: never.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps a batch is split into.")
    token_budget: int = Field(8192, ge=8, description="Tokens of one packed micro-batch, on each rank.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type the learner computes in.")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage.")
    offload_optimizer: bool = Field(False, description="Keep the optimizer state in host memory (ZeRO 2 and 3).")
    offload_params: bool = Field(False, description="Keep parameters in host memory (ZeRO 3).")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    attention: Literal["auto", "varlen", "flash_attention_2", "sdpa"] = Field(
        "auto",
        description="Attention over packed sequences; `auto` takes the first that can be used: `varlen`, torch's own "
        "on a GPU, `flash_attention_2` where flash-attn is installed, `sdpa`. The log says which, and why.",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch",
        description="What computes norms, rotary positions and gated layers; `liger`: fused kernels on a GPU (extra "
        "`liger`).",
    )
    logprob_chunk: int = Field(1024, ge=1, description="Tokens whose logits exist at the same time.")
    checkpoint_every: int = Field(
        20, ge=1, description="Steps between checkpoints; batches are kept until two hold their gradient."
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Older checkpoints are removed. With 1, nothing is left if the only one is damaged."
    )
    checkpoint_in_background: bool = Field(
        True,
        description="Train on while a checkpoint is written, from a copy in host memory. Off, no copy is made.",
    )
    rank_timeout: float = Field(
        1800.0,
        ge=1,
        description="Seconds that ranks wait for one that loads, saves or stands still, before they end and have to be "
        "started again. Collectives of training on NCCL have a time-out of their own.",
    )
    export: bool = Field(
        True,
        description="Write each checkpoint as a Hugging Face model too; an adapter (`learner.lora`) is written anyway.",
    )
    lora: LoraConfig | None = None
    weights: WeightsConfig = WeightsConfig()
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="Merged into the DeepSpeed configuration.", json_schema_extra=LOCAL
    )


class SandboxConfig(Section):
    """Where model-written code runs."""

    url: str | None = Field(
        None,
        description="A SandboxFusion-compatible server; null: isolated, on the generator's machine.",
        json_schema_extra=LOCAL,
    )
    token: str | None = Field(
        None,
        description="Sent to the server as a bearer token. Where it is null, `SPO_SANDBOX_TOKEN` of the environment "
        "is, which stays out of the run's files.",
        json_schema_extra=LOCAL,
    )
    token_file: str | None = Field(None, description="File with that token, instead.", json_schema_extra=LOCAL)
    concurrency: int = Field(
        128, ge=1, description="Programs under way at a time, from one process.", json_schema_extra=LOCAL
    )
    timeout: float = Field(
        30.0, gt=0, description="Seconds an answer may take beyond the program's own time limits.", allow_inf_nan=False
    )
    attempts: int = Field(5, ge=1, description="Requests until a server that gives no result counts as unavailable.")
    wait: float = Field(
        60.0,
        gt=0,
        description="Seconds that a generator which starts waits for its sandbox to answer.",
        json_schema_extra=LOCAL,
    )
    memory_mb: int = Field(1024, ge=16, description="Memory of one program in MiB.")


class EvalConfig(Section):
    """Held-out evaluation, each with one version of the weights while training goes on."""

    every: int = Field(10, ge=0, description="Learner steps between evaluations; 0: only at the start and the end.")
    before_training: bool = Field(True, description="Evaluate the version that training starts from too.")
    limit: int | None = Field(None, ge=1, description="Held-out prompts to use, of each data set; null: all.")
    samples: int = Field(1, ge=1, description="Responses a prompt, n; above 1 there are avg@n, maj@n and pass@k too.")
    by_column: str | None = Field(
        None,
        description="Column of the held-out data, of at most 32 values, for each of which there are figures too.",
    )
    temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluation.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of evaluation.")
    top_k: int = Field(20, ge=0, description="Top-k of evaluation; 0: all tokens.")


class BrokerConfig(Section):
    """The Redis server between the processes."""

    url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="`redis://`, `rediss://`, `unix://`, or `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB` "
        "(`rediss+sentinel://` with TLS).",
        json_schema_extra=LOCAL,
    )
    password_file: str | None = Field(
        None, description="File with the server's password, which then stands in no URL.", json_schema_extra=LOCAL
    )
    wait: float = Field(60.0, ge=0, description="Seconds to wait for the server.", json_schema_extra=LOCAL)
    heartbeat: float = Field(1.0, gt=0, description="Seconds between heartbeats.")
    dead_after: float = Field(10.0, gt=0, description="Seconds without a heartbeat until others take over.")
    memory_share: float = Field(
        0.8, gt=0, le=1, description="Of Redis' `maxmemory`: beyond it no task is sent, and the learner saves early."
    )


class Config(Section):
    """The whole file."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    sampler: SamplerConfig = SamplerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    episode: EpisodeConfig = EpisodeConfig()
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig = EvalConfig()
    broker: BrokerConfig = BrokerConfig()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return fill_in(data) if isinstance(data, Mapping) else data
