"""Settings that have no effect, or less than they promise: nothing breaks, but a user may rely on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.config.algorithm import GROUP_METHODS, AlgorithmConfig
from common.config.correction import CorrectionConfig, SkyRLCorrection
from common.config.data import DataConfig
from common.config.generator import EpisodeConfig
from common.config.losses import MEAN_OF_MEANS
from common.config.presets import PRESETS
from common.config.run import Config
from common.config.sampler import KINDS
from common.config.section import Section, notes_of

# Keys of the section `data` that hold for sources which do not set them.
READ_BY_SOURCES = (
    "config", "prompt_column", "answer_column", "answer_after", "id_column", "system_prompt", "prompt_markup",
    "template_options",
)  # fmt: skip
# For each built-in simulated user, the option that limits its turns, and the default.
TURN_OPTIONS = {"corrector": ("turns", 3), "llm": ("max_turns", 5)}
# SkyRL's fields that are read only with one value of another field.
SKYRL_FIELDS = (
    ("tis_ratio_type", "token", ("token_tis_ratio_clip_high",)),
    ("tis_ratio_type", "sequence", ("sequence_tis_ratio_clip_high",)),
    ("sequence_mask_metric", "geometric", ("geo_mask_low", "geo_mask_high")),
    ("sequence_mask_metric", "product", ("product_mask_low", "product_mask_high")),
)


def warnings(config: Config) -> list[str]:
    """One line for each setting without effect, or without its full effect, with the reason."""
    return [
        *_former(config),
        *_method(config),
        *_modes(config),
        *_lengths(config),
        *algorithm_warnings(config),
        *_data(config),
        *_teacher(config),
        *episode_warnings(config),
    ]


def _former(config: Config) -> Iterator[str]:
    """Former keys and names, but for those of the algorithm and of episodes, which have functions of their own."""
    for name in Config.model_fields:
        if name not in ("algorithm", "episode"):
            yield from notes_of(getattr(config, name), name)


def algorithm_warnings(config: Config) -> list[str]:
    """Warnings about the loss and the correction. A value that a preset sets is never warned about."""
    algorithm = config.algorithm
    lines = [*notes_of(algorithm)]
    if algorithm.turn_advantage == "turn" and not any(one.user for one in config.episodes_in_use().values()):
        lines.append(
            "turn_advantage = 'turn' tells turns apart by a simulated user's rewards, but episode.user is null"
        )
    correction = (f"correction.{line}" for line in _correction(algorithm))
    return [f"algorithm.{line}" for line in (*lines, *correction, *_loss(algorithm), *_proximal(config))]


def episode_warnings(config: Config) -> list[str]:
    """Warnings about the episodes of the run and of its sources."""
    episodes = config.episodes_in_use().items()
    return [
        f"{key}.{line}"
        for key, episode in episodes
        for line in (*notes_of(episode), *_turns(episode, key), *_agent(episode))
    ]


def _method(config: Config) -> Iterator[str]:
    """Settings of other methods, and settings that matter only if the tracker is the baseline."""
    algorithm, sampler = config.algorithm, config.sampler
    method = f"with algorithm.method = {algorithm.method!r}"
    if algorithm.method not in GROUP_METHODS:
        why = f"{method}; it belongs to {', '.join(GROUP_METHODS)}"
        yield from _idle("algorithm.", algorithm, ("group_size", "refill_degenerate"), why)
    if algorithm.method in GROUP_METHODS or algorithm.advantage not in (None, algorithm.method):
        why = f"{method}, which z-scores no batch" if algorithm.advantage is None else "with an own algorithm.advantage"
        yield from _idle("sampler.advantage.", sampler.advantage, ("token_weighted", "clip"), why)
    if sampler.tracker.kind not in KINDS:
        why = f"with sampler.tracker.kind = {sampler.tracker.kind!r}, whose value is alpha / (alpha + beta)"
        yield from _idle("sampler.tracker.", sampler.tracker, ("prior", "group_column", "prompt_states"), why)
    yield from _critic(config)
    if algorithm.method == "spo":
        return
    why = f"{method}: the tracker only counts rewards"
    if sampler.selection.criterion == "uniform":
        yield from _idle("sampler.", sampler, ("initial_values",), f"on training {why}")
        if sampler.drift.mode == "rescore":
            yield f"sampler.drift.mode = 'rescore' is not worth a forward pass per task {why}; leave it out"


def _critic(config: Config) -> Iterator[str]:
    """Settings of a critic if there is none; else a setting of the tracker's advantages."""
    algorithm, sampler = config.algorithm, config.sampler
    if not algorithm.has_critic:
        why = "with algorithm.baseline = 'tracker'; it belongs to critic, both"
        yield from _idle("critic.", config.critic, tuple(type(config.critic).model_fields), why)
    elif config.critic.warmup_steps == 0:
        why = f"with algorithm.baseline = {algorithm.baseline!r}, whose advantages are z-scored by token"
        yield from _idle("sampler.advantage.", sampler.advantage, ("token_weighted",), why)


def _modes(config: Config) -> Iterator[str]:
    """Settings that a mode makes idle: those of drift, schedule, prefix cache, agents, adapter and evaluations."""
    drift, learner, generator = config.sampler.drift, config.learner, config.generator
    if config.algorithm.method == "spo" and drift.mode != "constant":
        why = f"with sampler.drift.mode = {drift.mode!r}; it belongs to constant"
        yield from _idle("sampler.drift.", drift, ("rho",), why)
    if learner.schedule == "constant":
        why = "with learner.schedule = 'constant'; it belongs to linear, cosine"
        yield from _idle("learner.", learner, ("min_lr_ratio",), why)
    if reason := _no_kept_prefix(config):
        yield from _idle("generator.", generator, ("keep_prefix",), f"with {reason}")
    if all(episode.agent is None for episode in config.episodes_in_use().values()):
        yield from _idle("generator.", generator, ("tool_parser", "reasoning_parser"), "without episode.agent")
    if learner.lora is not None and learner.lr == type(learner).model_fields["lr"].default:
        yield (
            f"learner.lr = {learner.lr:g}, the default, is meant for all weights; an adapter (learner.lora) needs "
            "about ten times that"
        )
    if config.data.heldout is None:
        yield from _idle("eval.", config.eval, tuple(type(config.eval).model_fields), "without data.heldout")


def _no_kept_prefix(config: Config) -> str | None:
    """Why nothing is kept in the prefix cache after an update; None if something is."""
    lora = config.learner.lora
    if lora is not None and lora.serve == "adapter":
        return "learner.lora.serve = 'adapter': vLLM keeps what each version of an adapter caches apart"
    if config.run.deterministic:
        return "run.deterministic: nothing is cached, and no weights arrive during an episode"
    if not config.generator.engine.get("enable_prefix_caching", True):
        return "generator.engine.enable_prefix_caching = False"
    return None


def _lengths(config: Config) -> Iterator[str]:
    """Limits of responses that the model's length does not allow after the longest prompt."""
    whole, prompt = config.model.max_model_len, config.data.max_prompt_tokens
    for key, episode in config.episodes_in_use().items():
        if prompt + episode.max_response_tokens > whole:
            yield (
                f"{key}.max_response_tokens = {episode.max_response_tokens} is cut short to {whole - prompt} beside a "
                f"prompt of data.max_prompt_tokens = {prompt} by model.max_model_len = {whole}; raise that to "
                f"{prompt + episode.max_response_tokens}, or lower one of the two"
            )


def _data(config: Config) -> Iterator[str]:
    """Keys of the section that no source reads, and weights of held-out sources."""
    data = config.data
    sources = data.all_sources()
    for name in READ_BY_SOURCES:
        value = getattr(data, name)
        if value != DataConfig.model_fields[name].default and all(getattr(source, name) != value for source in sources):
            yield (
                f"data.{name} = {value!r} has no effect: every source has one of its own, or is a set known by name; "
                "set it for a source"
            )
    for source in data.sources("heldout"):
        if source.weight != 1:
            yield f"{source.key}.weight = {source.weight:g} has no effect: every held-out prompt is evaluated"


def _teacher(config: Config) -> Iterator[str]:
    """Settings of teachers without effect, and settings that work against a teacher."""
    teacher, in_use = config.teacher, config.teachers_in_use()
    if not in_use:
        names = ("top_k", "form", "weight", "decay_steps", "url_model", "api_key_env", "dtype")
        yield from _idle("teacher.", teacher, names, "without a teacher: none of model, url and context is set")
        return
    if not config.run.has_learner:
        yield "teacher.model, teacher.url or teacher.context has no effect with run.steps = 0: nothing is trained"
    if teacher.weight == 0:
        yield "teacher.weight = 0: its scores are only measured"
    if config.algorithm.refill_degenerate:
        yield (
            "algorithm.refill_degenerate = True replaces groups of equal rewards, from which the teacher would still "
            "teach; set it to false"
        )


def _turns(episode: EpisodeConfig, key: str) -> Iterator[str]:
    """A simulated user whose turns are cut short by another limit."""
    option, default = TURN_OPTIONS.get(episode.user or "", ("", 0))
    turns = episode.user_options.get(option, default)
    if not option or not isinstance(turns, int):
        return
    possible, causes, allowed = turns, [], episode.assistant_turns
    if allowed is not None and allowed <= turns:
        possible = allowed - 1
        causes.append(f"{key}.max_assistant_turns = {allowed} (set it to {turns + 1} or more)")
    if episode.max_user_turns is not None and episode.max_user_turns < turns:
        possible = min(possible, episode.max_user_turns)
        causes.append(f"{key}.max_user_turns = {episode.max_user_turns} (set it to {turns} or more)")
    if causes:
        setting = f"{option} = {turns}" + ("" if option in episode.user_options else ", its default,")
        yield f"user_options.{setting} is cut short to {possible} by {' and '.join(causes)}; or set {option}={possible}"


def _agent(episode: EpisodeConfig) -> Iterator[str]:
    """An agent that nothing ends if it hangs."""
    if episode.agent is not None and episode.max_seconds is None:
        yield "max_seconds = null lets an agent that hangs keep its slot for ever; set a limit"


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    skyrl, level = correction.skyrl, correction.weight and correction.weight.level
    if correction.rollout_is is None:
        why = "while rollout_is is null" if skyrl is None else "beside skyrl, which has fields of its own"
        yield from _idle("", correction, ("rollout_is_threshold",), why)
    if level is not None and not algorithm.weighs_loss and algorithm.ess_lr == "none":
        field = "rollout_is" if skyrl is None else "skyrl.tis_ratio_type"
        yield (
            f"{field} = {level!r} is only measured: with proximal = 'rollout', the ratio pi_theta / pi_rollout of loss "
            f"{algorithm.loss!r} is already the importance weight; set {field}=null, or another proximal"
        )
        if correction.rollout_is_batch_normalize:
            yield "rollout_is_batch_normalize = True divides weights that are only measured"
    if correction.verl_compatible_k1 and not any(mask.estimator == "k1" for mask in correction.rejection()):
        yield f"verl_compatible_k1 = True has no effect on rollout_rs = {correction.rollout_rs!r}"
    # The veto is the same at every age.
    if correction.thresholds_by_age is not None and not any(stage.by_age for stage in correction.stages()):
        yield "thresholds_by_age has no effect: there are neither weights nor rules for it to bound"
    if skyrl is not None:
        yield from (f"skyrl.{line}" for line in _skyrl(skyrl))


def _skyrl(skyrl: SkyRLCorrection) -> Iterator[str]:
    low, high = skyrl.token_mask_is_threshold_low, skyrl.token_mask_is_threshold_high
    if (low is None) != (high is None):
        side, other = ("low", "high") if high is None else ("high", "low")
        why = f"without token_mask_is_threshold_{other}"
        yield from _idle("", skyrl, (f"token_mask_is_threshold_{side}",), why)
    for chosen, needed, names in SKYRL_FIELDS:
        current = getattr(skyrl, chosen)
        for name, value in _changed(skyrl, names):
            if current != needed:
                yield f"{name} = {value!r} is read only with {chosen} = {needed!r} (given: {current!r})"


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    if algorithm.ess_lr != "none" and not correction.stages():
        yield (
            f"ess_lr = {algorithm.ess_lr!r} has no effect without importance weights or rejection: the effective "
            "sample size is always 1"
        )
    if algorithm.loss in MEAN_OF_MEANS and algorithm.aggregation != "seq-mean-token-mean":
        yield (
            f"aggregation = {algorithm.aggregation!r} with loss {algorithm.loss!r} departs from verl, which always "
            "averages this loss by seq-mean-token-mean"
        )
    if algorithm.loss in ("ppo_clip", "gspo") and (low := algorithm.loss_options.get("low", 0.0)) >= 1:
        yield f"loss_options.low = {low:g} switches the lower clip off: 1 - low is not above 0"
    if algorithm.kl_coef == 0:
        yield from _idle("", algorithm, ("kl_estimator", "reference"), "while kl_coef is 0")
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


def _idle(prefix: str, section: Section, names: tuple[str, ...], why: str) -> Iterator[str]:
    """A line for each of these fields that was changed without effect."""
    for name, value in _changed(section, names):
        yield f"{prefix}{name} = {value!r} has no effect {why}"


def _changed(section: Section, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Fields that are neither at their default nor at what the preset sets, with their values."""
    name = section.preset_name if isinstance(section, CorrectionConfig) else None
    preset = {} if name is None else PRESETS[name].fields
    for name in names:
        value = getattr(section, name)
        if value != preset.get(name, type(section).model_fields[name].default):
            yield name, value
