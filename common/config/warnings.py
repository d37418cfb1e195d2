"""Settings that have no effect, or less than they promise: nothing breaks, but a user may rely on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.config.algorithm import GROUP_METHODS, LOSS_NAMES, MEAN_OF_MEANS, AlgorithmConfig
from common.config.correction import CorrectionConfig
from common.config.data import DataConfig
from common.config.episode import EpisodeConfig
from common.config.presets import PRESETS
from common.config.section import Section
from common.config.sections import Config
from common.config.skyrl import SkyRLCorrection
from common.config.source_config import episodes_in_use

# The losses that read each knob.
CLIPPED = ("ppo_clip", "gspo", "cispo")
KNOBS: dict[str, tuple[str, ...]] = {
    "clip_low": CLIPPED,
    "clip_high": CLIPPED,
    "clip_dual": ("ppo_clip",),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "band_low": ("double_sided",),
    "band_high": ("double_sided",),
}


# Keys of the section `data` that stand for sources which do not set them.
READ_BY_SOURCES = ("config", "prompt_column", "answer_column", "answer_after", "id_column", "system_prompt")

# The methods that read each setting of theirs.
METHOD_SETTINGS: dict[str, tuple[str, ...]] = {
    "group_size": GROUP_METHODS,
    "group_std": ("grpo",),
    "refill_degenerate": GROUP_METHODS,
    "refill_limit": GROUP_METHODS,
}

# For each built-in simulated user, the option that limits its turns, and the default.
TURN_OPTIONS = {"corrector": ("turns", 3), "llm": ("max_turns", 5)}


def warnings(config: Config) -> list[str]:
    """One line for each setting without effect, or without its full effect, with the reason."""
    return [
        *method_warnings(config),
        *schedule_warnings(config),
        *length_warnings(config),
        *algorithm_warnings(config),
        *data_warnings(config),
        *run_episode_warnings(config),
    ]


def method_warnings(config: Config) -> list[str]:
    """The same for settings of other methods, and for what only a tracker that is the baseline needs."""
    algorithm, sampler = config.algorithm, config.sampler
    method = f"algorithm.method = {algorithm.method!r}"
    lines = []
    for name, methods in METHOD_SETTINGS.items():
        for _, value in _changed(algorithm, (name,)):
            if algorithm.method not in methods:
                lines.append(
                    f"algorithm.{name} = {value!r} has no effect with {method}; it belongs to {', '.join(methods)}"
                )
            elif name == "refill_limit" and not algorithm.refill_degenerate:
                lines.append(f"algorithm.{name} = {value!r} has no effect without algorithm.refill_degenerate")
    if algorithm.method in GROUP_METHODS and sampler.advantage.token_weighted:
        lines.append(f"sampler.advantage.token_weighted = True has no effect with {method}, which z-scores no batch")
    if algorithm.method == "spo":
        return lines
    why = f"with {method}: the tracker only keeps count"
    for name, value in _changed(sampler.advantage, ("baseline",)):
        lines.append(f"sampler.advantage.{name} = {value!r} has no effect {why}")
    if sampler.selection.criterion != "uniform":
        return lines
    if sampler.initial_values is not None:
        lines.append(f"sampler.initial_values = {sampler.initial_values!r} has no effect on training {why}")
    if sampler.drift.mode == "rescore":
        lines.append(f"sampler.drift.mode = 'rescore' is not worth its forward pass a task {why}; leave it out")
    return lines


def schedule_warnings(config: Config) -> list[str]:
    """The same for what belongs to another mode of drift or of the engine, another schedule, or to evaluations."""
    drift, learner = config.sampler.drift, config.learner
    lines = []
    if config.algorithm.method == "spo" and drift.mode != "constant":
        for name, value in _changed(drift, ("rho",)):
            lines.append(
                f"sampler.drift.{name} = {value!r} has no effect with sampler.drift.mode = {drift.mode!r}; it belongs "
                "to constant"
            )
    if learner.schedule == "constant":
        for name, value in _changed(learner, ("min_lr_ratio",)):
            lines.append(
                f"learner.{name} = {value!r} has no effect with learner.schedule = 'constant'; it belongs to linear, "
                "cosine"
            )
    if config.generator.keep_prefix != "none" and (reason := _no_kept_prefix(config)):
        lines.append(f"generator.keep_prefix = {config.generator.keep_prefix!r} has no effect with {reason}")
    if learner.lora is not None and learner.lr == type(learner).model_fields["lr"].default:
        lines.append(
            f"learner.lr = {learner.lr:g}, the default, is meant for all weights; an adapter (learner.lora) learns at "
            "about ten times that of all weights"
        )
    if config.data.heldout is None:
        for name, value in _changed(config.eval, tuple(type(config.eval).model_fields)):
            lines.append(f"eval.{name} = {value!r} has no effect without data.heldout")
    return lines


def _no_kept_prefix(config: Config) -> str | None:
    """Why nothing is kept in the prefix cache over an update; None: something is."""
    lora = config.learner.lora
    if lora is not None and lora.serve == "adapter":
        return "learner.lora.serve = 'adapter': vLLM keeps what each version of an adapter caches apart"
    if config.run.deterministic:
        return "run.deterministic: nothing is cached, and no weights come in the middle of an episode"
    if not config.generator.engine.get("enable_prefix_caching", True):
        return "generator.engine.enable_prefix_caching = False"
    return None


def length_warnings(config: Config) -> list[str]:
    """The same for responses that the model's length cuts short beside a long prompt."""
    whole, prompt = config.model.max_model_len, config.data.max_prompt_tokens
    return [
        f"{key}.max_response_tokens = {episode.max_response_tokens} is cut short to {whole - prompt} beside a prompt "
        f"of data.max_prompt_tokens = {prompt} by model.max_model_len = {whole}; raise that to "
        f"{prompt + episode.max_response_tokens}, or lower one of the two"
        for key, episode in episodes_in_use(config).items()
        if prompt + episode.max_response_tokens > whole
    ]


def data_warnings(config: Config) -> list[str]:
    """The same for the data: keys of the section that no source reads, and weights of held-out sources."""
    data = config.data
    sources = [*data.sources("train"), *data.sources("heldout")]
    lines = []
    for name in READ_BY_SOURCES:
        value = getattr(data, name)
        if value != DataConfig.model_fields[name].default and all(getattr(source, name) != value for source in sources):
            lines.append(
                f"data.{name} = {value!r} has no effect: every source has one of its own, or is a set known by name; "
                "set it for a source"
            )
    for source in data.sources("heldout"):
        if source.weight != 1:
            lines.append(f"{source.key}.weight = {source.weight:g} has no effect: every held-out prompt is evaluated")
    return lines


def run_episode_warnings(config: Config) -> list[str]:
    """`episode_warnings` of every source's episodes."""
    return [
        line.replace("episode.", f"{key}.") if key != "episode" else line
        for key, episode in episodes_in_use(config).items()
        for line in episode_warnings(episode)
    ]


def episode_warnings(episode: EpisodeConfig) -> list[str]:
    """The same for episodes: a simulated user whose turns are cut short by another limit."""
    option, default = TURN_OPTIONS.get(episode.user or "", ("", 0))
    turns = episode.user_options.get(option, default)
    if not option or not isinstance(turns, int):
        return []
    possible, causes = episode.max_assistant_turns - 1, []
    if possible < turns:
        causes.append(f"episode.max_assistant_turns = {episode.max_assistant_turns} (set it to {turns + 1} or more)")
    if episode.max_user_turns is not None and episode.max_user_turns < turns:
        possible = min(possible, episode.max_user_turns)
        causes.append(f"episode.max_user_turns = {episode.max_user_turns} (set it to {turns} or more)")
    if not causes:
        return []
    setting = f"{option} = {turns}" + ("" if option in episode.user_options else ", its default,")
    return [
        f"episode.user_options.{setting} is cut short to {possible} by {' and '.join(causes)}; "
        f"or set {option}={possible}"
    ]


def algorithm_warnings(config: Config) -> list[str]:
    """The same for the loss and the correction. A value that a preset sets is never warned about."""
    algorithm = config.algorithm
    lines = [f"correction.{note}" for note in algorithm.correction.notes]
    if algorithm.turn_advantage == "turn" and not any(episode.user for episode in episodes_in_use(config).values()):
        lines.append(
            "turn_advantage = 'turn' tells turns apart by what a simulated user gave, and episode.user is null"
        )
    lines += [*_weights(algorithm), *_bounds(algorithm.correction), *_loss(algorithm)]
    if algorithm.correction.skyrl is not None:
        lines += _skyrl(algorithm.correction.skyrl)
    return [f"algorithm.{line}" for line in (*lines, *_proximal(config))]


def _weights(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    if correction.rollout_is is None:
        why = "while rollout_is is null" if correction.skyrl is None else "beside skyrl, which has fields of its own"
        for name, value in _changed(correction, ("rollout_is_threshold",)):
            yield f"correction.{name} = {value!r} has no effect {why}"
    level = correction.weight and correction.weight.level
    if level is not None and not algorithm.weighs_loss and algorithm.ess_lr == "none":
        field = "rollout_is" if correction.skyrl is None else "skyrl.tis_ratio_type"
        yield (
            f"correction.{field} = {level!r} is measured only: with proximal = 'rollout', the ratio pi_theta / "
            f"pi_rollout of loss {algorithm.loss!r} is the importance weight already; set {field}=null, or another "
            "proximal"
        )
        if correction.rollout_is_batch_normalize:
            yield "correction.rollout_is_batch_normalize = True divides weights that are measured only"
    if algorithm.ess_lr != "none" and level is None and not correction.masks:
        yield (
            f"ess_lr = {algorithm.ess_lr!r} has no effect without importance weights or rejection: the effective "
            "sample size is always 1"
        )


def _bounds(correction: CorrectionConfig) -> Iterator[str]:
    if correction.verl_compatible_k1 and not any(mask.estimator == "k1" for mask in correction.rejection()):
        yield f"correction.verl_compatible_k1 = True has no effect on rollout_rs = {correction.rollout_rs!r}"
    # The veto is the same at every age.
    if correction.thresholds_by_age is not None and not any(stage.by_age for stage in correction.stages()):
        yield "correction.thresholds_by_age has no effect: there are neither weights nor rules for it to bound"
    if correction.loss_type == "reinforce" and not correction.bypass_mode:
        yield "correction.loss_type = 'reinforce' has no effect without bypass_mode; set algorithm.loss instead"


def _skyrl(skyrl: SkyRLCorrection) -> Iterator[str]:
    low, high = skyrl.token_mask_is_threshold_low, skyrl.token_mask_is_threshold_high
    if (low is None) != (high is None):
        side, other, value = ("low", "high", low) if high is None else ("high", "low", high)
        yield (
            f"correction.skyrl.token_mask_is_threshold_{side} = {value!r} has no effect without "
            f"token_mask_is_threshold_{other}"
        )
    for chosen, needed, names in (
        ("tis_ratio_type", "token", ("token_tis_ratio_clip_high",)),
        ("tis_ratio_type", "sequence", ("sequence_tis_ratio_clip_high",)),
        ("sequence_mask_metric", "geometric", ("geo_mask_low", "geo_mask_high")),
        ("sequence_mask_metric", "product", ("product_mask_low", "product_mask_high")),
    ):
        current = getattr(skyrl, chosen)
        if current == needed:
            continue
        for name, value in _changed(skyrl, names):
            yield f"correction.skyrl.{name} = {value!r} counts with {chosen} = {needed!r} only (given: {current!r})"


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name, value in _changed(algorithm, tuple(KNOBS)):
        # A loss of the user's own may read any of them.
        if algorithm.loss in LOSS_NAMES and algorithm.loss not in KNOBS[name]:
            yield f"{name} = {value!r} has no effect on loss {algorithm.loss!r}; it belongs to {', '.join(KNOBS[name])}"
    if algorithm.loss in MEAN_OF_MEANS and algorithm.aggregation != "seq-mean-token-mean":
        yield (
            f"aggregation = {algorithm.aggregation!r} with loss {algorithm.loss!r} departs from verl, which always "
            "averages this loss by seq-mean-token-mean"
        )
    if algorithm.loss in ("ppo_clip", "gspo") and algorithm.clip_low >= 1:
        yield f"clip_low = {algorithm.clip_low:g} switches the lower clip off: 1 - clip_low is not above 0"
    if algorithm.kl_coef == 0:
        for name, value in _changed(algorithm, ("kl_estimator", "reference")):
            yield f"{name} = {value!r} has no effect while kl_coef is 0"
    elif algorithm.kl_estimator == "k1":
        yield "kl_estimator = 'k1' has no effect on average: its gradient cancels out; use k2 or k3"


def _proximal(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.proximal not in ("interpolate", "compare"):
        return
    if config.learner.mini_batches == 1:
        nothing = "saves" if algorithm.proximal == "interpolate" else "compares"
        yield (
            f"proximal = {algorithm.proximal!r} {nothing} nothing while learner.mini_batches = 1: the training pass "
            "itself is the recomputed policy; use proximal=recompute"
        )
    elif algorithm.proximal == "interpolate" and algorithm.correction.rollout_is_batch_normalize:
        yield (
            "proximal = 'interpolate' saves nothing with correction.rollout_is_batch_normalize: the weights' mean "
            "takes a forward pass of its own"
        )


def _changed(section: Section, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Fields that are neither at their default nor at what the preset sets, with their values."""
    preset = _preset_values(section)
    for name in names:
        value = getattr(section, name)
        if value != preset.get(name, type(section).model_fields[name].default):
            yield name, value


def _preset_values(section: Section) -> Mapping[str, Any]:
    if isinstance(section, CorrectionConfig) and section.preset_name is not None:
        return PRESETS[section.preset_name].fields
    return {}
