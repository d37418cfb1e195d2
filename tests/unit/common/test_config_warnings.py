"""Settings without effect are named once, with the reason; what counts is never named."""

from __future__ import annotations

import inspect

import pytest
import yaml

from common.config import Config, parse_config
from common.config.load import ConfigLoader
from common.config.presets import ALIASES, PRESETS
from common.config.warnings import TURN_OPTIONS, episode_warnings, warnings
from common.masking import advice
from generator.users.load import BUILTIN


def config(text: str) -> Config:
    tree = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}} | (yaml.load(text, ConfigLoader) or {})
    return parse_config(tree)


def corrected(text: str) -> str:
    return f"algorithm: {{correction: {text}}}"


SILENT = [
    "",
    corrected("{rollout_is: token, rollout_is_threshold: 3.0, rollout_is_batch_normalize: true}"),
    "algorithm: {proximal: rollout, loss: reinforce, correction: {rollout_is: sequence}}",
    # The preset sets the threshold itself; only what the user wrote can mislead the user.
    corrected("{preset: icepop, rollout_is: null}"),
    "algorithm: {kl_coef: 0.1, kl_estimator: k2, reference: elsewhere}",
    "algorithm: {ess_lr: sqrt, correction: {rollout_is: null, rollout_token_veto_threshold: 1e-4}}",
    # The weights scale the learning rate, though not the loss.
    "algorithm: {ess_lr: sqrt, proximal: rollout, correction: {rollout_is: token}}",
    "{algorithm: {proximal: interpolate}, learner: {mini_batches: 4}}",
    "{generator: {tool_parser: mistral, reasoning_parser: qwen3}, episode: {agent: 'm:f', max_seconds: 60}}",
    # Methods.
    "sampler: {initial_values: v.json, advantage: {token_weighted: true}}",
    "{teacher: {model: t, form: loss, top_k: 8, decay_steps: 9, reward: false}, run: {steps: 1}}",
    "{algorithm: {baseline: critic}, critic: {lr: 1e-5, freeze_attention: true}, sampler: {advantage: {clip: 3}}}",
    # Turns of a simulated user.
    "episode: {user: corrector, max_assistant_turns: 2, user_options: {turns: 1}}",
    "episode: {user: scripted, max_assistant_turns: 2}",  # how much it says stands in the data
    "episode: {user: corrector, max_assistant_turns: 2, user_options: {turns: two}}",  # refused by the generator
]
# What is written, and words of the one line.
NAMED = [
    (corrected("{rollout_is: null, rollout_is_threshold: 3.0}"), "rollout_is_threshold = 3.0 has no effect while"),
    (corrected("{skyrl: {}, rollout_is_threshold: 3.0}"), "rollout_is_threshold = 3.0 has no effect beside skyrl"),
    ("algorithm: {proximal: rollout, correction: {rollout_is: token}}", "rollout_is = 'token' is only measured"),
    (corrected("{rollout_is: token, verl_compatible_k1: true}"), "verl_compatible_k1 = True has no effect on rollout_"),
    (corrected("{rollout_is: null, thresholds_by_age: [1, 1, 1, 1, 0.5]}"), "thresholds_by_age has no effect"),
    (corrected("{skyrl: {token_mask_is_threshold_low: 0.5}}"), "without token_mask_is_threshold_high"),
    ("algorithm: {loss: gspo, aggregation: token-mean}", "aggregation = 'token-mean' with loss 'gspo' departs from ve"),
    ("algorithm: {loss_options: {low: 2.0}}", "loss_options.low = 2 switches the lower clip off"),
    ("algorithm: {turn_advantage: turn}", "turn_advantage = 'turn' tells turns apart by a simulated user's rewards"),
    ("algorithm: {kl_estimator: k2}", "kl_estimator = 'k2' has no effect while kl_coef is 0"),
    ("algorithm: {kl_coef: 0.1, kl_estimator: k1}", "kl_estimator = 'k1' has no effect on average"),
    ("algorithm: {ess_lr: sqrt, correction: {rollout_is: null}}", "ess_lr = 'sqrt' has no effect without"),
    ("algorithm: {proximal: interpolate}", "proximal = 'interpolate' saves nothing while learner.mini_batches = 1"),
    (
        "{algorithm: {proximal: interpolate, correction: {rollout_is: token, rollout_is_batch_normalize: true}}, "
        "learner: {mini_batches: 4}}",
        "the weights' mean takes a forward pass of its own",
    ),
    # Teachers.
    ("teacher: {weight: 0.5}", "teacher.weight = 0.5 has no effect without a teacher"),
    ("teacher: {model: t, weight: 0}", "teacher.weight = 0: its scores are only measured"),
    ("{teacher: {model: t}, run: {steps: 0}}", "teacher.context has no effect with run.steps = 0: nothing is trained"),
    # Methods.
    ("algorithm: {group_size: 4}", "algorithm.group_size = 4 has no effect with algorithm.method = 'spo'"),
    ("{algorithm: {method: grpo}, sampler: {advantage: {token_weighted: true}}}", "sampler.advantage.token_weighted ="),
    ("{algorithm: {method: rloo}, sampler: {drift: {mode: rescore}}}", "sampler.drift.mode = 'rescore' is not worth"),
    ("critic: {updates: 1}", "critic.updates = 1 has no effect with algorithm.baseline = 'tracker'"),
    # Other modes.
    ("sampler: {drift: {rho: 0.5}}", "sampler.drift.rho = 0.5 has no effect with sampler.drift.mode = 'rescore'"),
    ("learner: {min_lr_ratio: 0.1}", "learner.min_lr_ratio = 0.1 has no effect with learner.schedule"),
    ("learner: {lora: {}}", "learner.lr = 1e-06, the default, is meant for all weights"),
    ("eval: {samples: 8}", "eval.samples = 8 has no effect without data.heldout"),
    ("generator: {reasoning_parser: qwen3}", "generator.reasoning_parser = 'qwen3' has no effect without episode.ag"),
    ("{generator: {keep_prefix: episodes}, learner: {lora: {rank: 4}, lr: 1e-4}}", "generator.keep_prefix = 'episodes"),
    ("data: {train: [{path: gsm8k}], prompt_column: text}", "data.prompt_column = 'text' has no effect"),
    ("data: {train: t, heldout: [{path: aime24, weight: 2}]}", "data.heldout[aime24].weight = 2 has no effect"),
    # Turns of a simulated user.
    ("episode: {user: corrector, max_assistant_turns: 3}", "episode.user_options.turns = 3, its default, is cut short"),
    ("episode: {user: corrector, max_assistant_turns: 3, max_user_turns: 1}", "is cut short to 1 by"),
]


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_no_preset_warns_of_itself(name: str) -> None:
    for mini_batches in (1, 4):
        text = f"{{{corrected(f'{{preset: {name}}}')}, learner: {{mini_batches: {mini_batches}}}}}"
        assert warnings(config(text)) == []


@pytest.mark.parametrize("text", SILENT)
def test_what_counts_is_not_named(text: str) -> None:
    assert warnings(config(text)) == []


@pytest.mark.parametrize(("text", "words"), NAMED, ids=[text for text, _ in NAMED])
def test_a_setting_without_effect_is_named_with_the_reason(text: str, words: str) -> None:
    [line] = warnings(config(text))
    assert words in line
    assert line.split(".")[0] in Config.model_fields


def test_warnings_of_episodes_name_the_source() -> None:
    [line] = episode_warnings(config("data: {train: [{path: a, episode: {user: corrector, max_assistant_turns: 2}}]}"))
    assert "data.train[a].episode.max_assistant_turns = 2" in line


def test_an_agent_that_may_hang_for_ever_is_named() -> None:
    [line] = warnings(config("episode: {agent: 'a:b'}"))
    assert line.startswith("episode.max_seconds = null lets an agent that hangs")
    assert not warnings(config("episode: {agent: 'a:b', max_seconds: 60}"))


def test_turn_options_and_defaults_are_the_users_own() -> None:
    for user, (option, default) in TURN_OPTIONS.items():
        assert inspect.signature(BUILTIN[user]).parameters[option].default == default


@pytest.mark.parametrize(
    ("text", "named", "tries"),
    [
        (
            "{learner: {lr: 3.0e-4, mini_batches: 2}, model: {path: m, dtype: bfloat16}}",
            "preset decoupled_k3_rs_seq_tis (rollout_rs=seq_mean_k3, rollout_rs_threshold=0.01)",
            "fewer learner.mini_batches (now 2), a smaller learner.lr (now 0.0003), another preset (spo correction "
            "list) or model.dtype=float32 for the generators (now bfloat16)",
        ),
        (
            "{model: {path: m, dtype: float32}, algorithm: {correction: {rollout_token_veto_threshold: 1e-4, "
            "m2_threshold: 0.04}}}",
            "algorithm.correction (rollout_token_veto_threshold=0.0001, m2_threshold=0.04)",
            "a smaller learner.lr (now 1e-06) or another preset (spo correction list)",
        ),
    ],
)
def test_masked_tokens_are_traced_to_their_rule_and_never_to_too_little_staleness(
    text: str, named: str, tries: str
) -> None:
    assert advice(config(text)) == f"masked by {named}; try {tries}"
