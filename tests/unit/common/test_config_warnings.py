"""Settings without effect and keys of earlier releases are named once, with the reason; what counts is never named."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, dump_config, parse_config
from common.config.former_keys import GONE, LOSS_KEYS
from common.config.load import ConfigLoader
from common.config.losses import SPECS
from common.config.presets import ALIASES, PRESETS
from common.config.section import section_of
from common.config.warnings import TURN_OPTIONS, warnings
from common.errors import UserError
from common.masking import advice
from generator.users.load import BUILTIN
from tests.support.checks import config_of


def config(text: str) -> Config:
    return config_of(**yaml.load(text, ConfigLoader) or {})


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
# What is written, and words of the one line; none where nothing is said.
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
    ("{algorithm: {advantage: 'a:b'}, sampler: {advantage: {clip: 3}}}", "sampler.advantage.clip = 3.0 has no effect"),
    ("sampler: {tracker: {kind: 'a:b', group_column: level}}",
     "group_column = 'level' has no effect with sampler.tracker"),
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
    # Episodes.
    ("episode: {agent: 'a:b'}", "episode.max_seconds = null lets an agent that hangs"),
    ("data: {train: [{path: a, episode: {user: corrector, max_assistant_turns: 2}}]}", "train[a].episode.max_assistan"),
    ("episode: {user: corrector, max_assistant_turns: 3}", "episode.user_options.turns = 3, its default, is cut short"),
    ("episode: {user: corrector, max_assistant_turns: 3, max_user_turns: 1}", "is cut short to 1 by"),
]  # fmt: skip


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_no_preset_warns_of_itself(name: str) -> None:
    for mini_batches in (1, 4):
        text = f"{{{corrected(f'{{preset: {name}}}')}, learner: {{mini_batches: {mini_batches}}}}}"
        assert warnings(config(text)) == []


ROWS = [*((text, "") for text in SILENT), *NAMED]


@pytest.mark.parametrize(("text", "words"), ROWS, ids=[text for text, _ in ROWS])
def test_a_setting_without_effect_is_named_and_no_other(text: str, words: str) -> None:
    lines = warnings(config(text))
    assert len(lines) == bool(words)
    for line in lines:
        assert words in line
        assert line.split(".")[0] in Config.model_fields


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
def test_masked_tokens_are_traced_to_their_rule_and_never_to_low_staleness(text: str, named: str, tries: str) -> None:
    assert advice(config(text)) == f"masked by {named}; try {tries}"


def sections(model: Any = Config, at: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    found = {model.__name__: at}
    for name, field in model.model_fields.items():
        if (section := section_of(field.annotation)) is not None and name not in ("train", "heldout"):
            found |= sections(section, (*at, name))
    return found


def nested(path: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    for key in reversed(path):
        values = {key: values}
    return values


@pytest.mark.parametrize(("section", "name"), [(section, name) for section in GONE for name in GONE[section]])
def test_another_value_is_refused_with_what_holds_today(section: str, name: str) -> None:
    key = GONE[section][name]
    with pytest.raises(UserError) as refused:
        config_of(**nested(sections()[section], {name: "another"}))
    for words in (".".join(sections()[section]), f"{name} = 'another' is no longer a key", key.today, "; remove it"):
        assert words in str(refused.value)


@pytest.mark.parametrize("name", LOSS_KEYS)
def test_a_key_of_losses_is_an_option_of_those_that_have_it(name: str) -> None:
    key, value = LOSS_KEYS[name], LOSS_KEYS[name].default / 2 + 0.6
    for loss in SPECS:
        options = {"beta": 1.0} if loss == "dro" else {}
        made = config(f"algorithm: {{loss: {loss}, {name}: {value}, loss_options: {options}}}")
        has_it = loss in key.losses
        assert made.algorithm.loss_options == options | ({key.option: value} if has_it else {})
        lines = [line for line in warnings(made) if name in line]
        assert len(lines) == 1
        assert ("say loss_options={" if has_it else "has no effect on loss") in lines[0]
        default = config(f"algorithm: {{loss: {loss}, {name}: {key.default}, loss_options: {options}}}")
        assert default.algorithm.loss_options == options
        assert "remove it" in " ".join(warnings(default))


def test_a_run_folder_of_an_earlier_release_starts(tmp_path: Path) -> None:
    tree = yaml.safe_load(dump_config(config("")))
    for section, gone in GONE.items():
        values = tree
        for key in sections()[section]:
            values = values[key]
        values.update({name: key.default for name, key in gone.items()})
    tree["algorithm"] |= {name: key.default for name, key in LOSS_KEYS.items()}
    tree["algorithm"]["correction"] |= {"bypass_mode": False, "loss_type": "ppo_clip"}
    made = parse_config(tree)
    assert dump_config(made) == dump_config(config(""))
    assert len(warnings(made)) == len(GONE) + 2


@pytest.mark.parametrize(
    ("text", "key", "today", "words"),
    [
        ("data: {train: org/set, train_split: all}", "data.train", [{"path": "org/set", "split": "all"}], "older name"),
        ("data: {train: [{path: gsm8k}, {path: a}], train_split: all}", "data.train", [{}, {"split": "all"}], "older"),
        ("data: {train: t, heldout: org/set, heldout_split: all}", "data.heldout", [{"split": "all"}], "older name"),
        ("data: {train: t, heldout_split: test}", "data.heldout", None, "remove it"),
        ("{algorithm: {method: grpo, group_std: false}}", "algorithm.method", "dr_grpo", "say method='dr_grpo'"),
        ("{learner: {offload_optimizer: true, zero_stage: 2}}", "learner.offload", "optimizer", "offload='optimizer'"),
        ("{algorithm: {group_std: false}}", "algorithm.method", "spo", "remove it"),
    ],
)
def test_what_has_a_new_place_is_moved_there(text: str, key: str, today: Any, words: str) -> None:
    made = config(text)
    section, name = key.split(".")
    value = getattr(getattr(made, section), name)
    if isinstance(today, list):
        assert [{field: getattr(one, field) for field in ("path", "split") if field in wanted}
                for one, wanted in zip(value, today, strict=True)] == today  # fmt: skip
    else:
        assert value == today
    [line] = [line for line in warnings(made) if "longer a key" in line or "older name" in line]
    assert words in line
