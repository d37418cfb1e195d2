"""`spo correction`: presets that can be listed and pasted, and bounds in plain numbers that are the engine's own."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from common.config import AlgorithmConfig, parse_config
from common.config.losses import SPECS
from common.config.presets import ALIASES, ALL, PRESETS, RECOMMENDED, Preset
from launcher.explanation import explain
from learner.correction import correct
from tests.support.checks import start
from tests.support.spo_command import Spo, spo_output

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "arithmetic.yaml"
BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
NO_EFFECT = "algorithm.kl_estimator=k2"
NOTE = "algorithm.kl_estimator = 'k2' has no effect while kl_coef is 0"


output_of = partial(spo_output, "correction")


def test_the_list_has_every_preset() -> None:
    blocks = output_of("list", COLUMNS="40").split("\n\n")
    for preset, block in zip(ALL, blocks, strict=False):
        heading, formula, use = block.splitlines()
        assert heading.split()[0] == preset.name
        assert all(alias in heading for alias in preset.aliases)
        assert ("recommended" in heading) == (preset.name == RECOMMENDED)
        assert (formula.strip(), use.strip()) == (preset.formula, preset.use)
    assert "algorithm.correction.preset=NAME" in blocks[len(ALL)]


def test_a_terminal_shows_a_table_and_plain_text_is_asked_for() -> None:
    shown = output_of("list", FORCE_COLOR="1", COLUMNS="110")
    assert "\x1b[" in shown
    assert all(name in shown for name in (*PRESETS, *ALIASES, "recommended"))
    assert output_of("list", "--plain", FORCE_COLOR="1") == output_of("list")
    assert "\x1b[" not in output_of("list") + output_of("show", "sao") + output_of("explain", CONFIG)
    assert all(output_of("show", alias) == output_of("show", name) for alias, name in ALIASES.items())
    # Brackets are text, not markup.
    assert "[0.5, 2]" in output_of("show", "seq_mis", FORCE_COLOR="1", COLUMNS="200")


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_the_yaml_of_a_preset_says_the_same_as_its_name(preset: Preset) -> None:
    shown = output_of("show", preset.name)
    _, _, text = shown.partition("spelled out:")
    pasted = AlgorithmConfig.model_validate(yaml.safe_load(text)["algorithm"])
    named = AlgorithmConfig.model_validate({"correction": {"preset": preset.name}})
    nameless = named.correction.model_copy(update={"preset_name": None})
    assert pasted == named.model_copy(update={"correction": nameless})
    for piece in (preset.formula, preset.use, preset.source, f"-o algorithm.correction.preset={preset.name}"):
        assert piece in shown


RULES = [
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4", "verl_compatible_k1": True},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 3.0},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4.0"},
    {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.3},
    {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.3},
    {"skyrl": {"token_mask_is_threshold_low": 0.6, "token_mask_is_threshold_high": 1.4}},
    {"skyrl": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.4}},
    {"skyrl": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8}},
    {"skyrl": {"sequence_mask_metric": "product"}},
]


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_bounds_in_words_are_those_of_the_engine(fields: dict[str, Any]) -> None:
    config = parse_config({**BASE, "algorithm": {"correction": {"rollout_is": None, **fields}}})
    words = "\n".join(dict(explain(config))["rejection"])
    low, high = (float(value) for value in re.search(r"leaves \[([\d.]+), ([\d.]+)\]", words).groups())
    ratios = [low * 0.999, low * 1.001, high * 0.999, high * 1.001]
    # Rows of one token: there the statistics of all levels are the token's own.
    x = torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    kept = correct(x, torch.zeros_like(x), torch.ones_like(x), config.algorithm.correction).mask.squeeze(1).tolist()
    assert kept == [False, True, True, False]


VETO = {"rollout_token_veto_threshold": 1e-4}
BY_AGE = {
    "rollout_is": "token",
    "rollout_is_threshold": 4.0,
    "rollout_rs": "seq_sum_k1",
    "rollout_rs_threshold": "0.25_4.0",
    "thresholds_by_age": [1, 1, 1, 0.5, 0.5],
}
BATCH_NORMALIZED = {"rollout_is": "token", "rollout_is_batch_normalize": True}
# A section `algorithm`, the number of mini-batches, and words of one part of its explanation.
EXPLAINED: list[tuple[dict[str, Any], int, str, str]] = [
    *(
        ({"correction": fields}, 1, "rejection", words)
        for fields, words in (
            (VETO, "rows with any token whose pi_old / pi_rollout is below 0.0001"),
            ({"skyrl": {"outlier_token_is_threshold_high": 100.0}}, "any token whose pi_old / pi_rollout is above 100"),
            ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0}, "rows whose product of pi_old / pi_rollout"),
            ({"skyrl": {"sequence_mask_metric": "geometric"}}, "the loss keeps the denominator"),
            ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1}, "divided by the tokens (or rows) that are left"),
            ({"rollout_is": None}, "none"),
            (BY_AGE, "oldest token, in versions: [0.25, 4] at 0"),
            (BY_AGE, "[0.5, 2] at 5+"),
        )
    ),
    ({"correction": BY_AGE}, 1, "importance weights", "4 at 0, 4 at 1, 4 at 2, 2 at 3-4, 2 at 5+"),
    ({}, 1, "importance weights", "is multiplied by min(product of the row's pi_old / pi_rollout, C), C = 2"),
    ({"proximal": "rollout"}, 1, "importance weights", "is only measured"),
    ({"proximal": "rollout"}, 1, "loss", "r = pi_theta / pi_rollout"),
    ({"proximal": "rollout"}, 1, "settings without effect", "is only measured"),
    ({}, 1, "extra forward passes", "none"),
    ({}, 4, "extra forward passes", "pi_old of 3 of the 4 mini-batches"),
    ({"correction": {"preset": "bypass_ppo_clip"}}, 4, "extra forward passes", "none"),
    ({"kl_coef": 0.1}, 1, "extra forward passes", "the reference policy"),
    ({"correction": {"m2_threshold": 0.04}}, 1, "rejection", "until the mean of the others is below 0.04"),
    ({"correction": {"m2_threshold": 0.04}}, 1, "extra forward passes", "a comparison of all tokens"),
    ({"loss": "kl_cov", "loss_options": {"coef": 2}}, 1, "loss", "plus 2 |log r| for the share 0.0002 of tokens"),
    ({"loss": "dro", "loss_options": {"beta": 3}}, 1, "loss", "dro: -(A log pi_theta - 3 / 2 (log pi_theta"),
    ({"aggregation": "prompt-mean"}, 1, "loss", "the mean over prompts"),
    *(
        ({"loss": name, "loss_options": {"beta": 1} if name == "dro" else {}}, 1, "loss", f"{name}: -")
        for name in SPECS
        if name != "gpg"
    ),
    ({"correction": BATCH_NORMALIZED}, 1, "extra forward passes", "the weights' mean"),
    (
        {"correction": {"preset": "icepop", "rollout_is_threshold": 3.0}}, 1,
        "preset", "icepop, with rollout_is_threshold = 3.0",
    ),
    *(({"correction": {"preset": preset}}, 1, "settings without effect", "none") for preset in PRESETS),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "mini_batches", "part", "words"), EXPLAINED, ids=str)
def test_a_correction_is_put_into_words(algorithm: dict[str, Any], mini_batches: int, part: str, words: str) -> None:
    config = parse_config({**BASE, "algorithm": algorithm, "learner": {"mini_batches": mini_batches}})
    assert words in "\n".join(dict(explain(config))[part])


def test_explain_names_what_has_no_effect() -> None:
    shown = output_of("explain", CONFIG, "-o", "algorithm.correction.preset=icepop")
    assert "tokens whose pi_old / pi_rollout leaves [0.5, 5] are left out" in shown
    assert NOTE in output_of("explain", CONFIG, "-o", NO_EFFECT)


def test_config_names_what_has_no_effect_beside_the_yaml(spo: Spo) -> None:
    ran = spo("config", CONFIG, "-o", NO_EFFECT)
    assert yaml.safe_load(ran.stdout)["algorithm"]["kl_estimator"] == "k2"
    assert ran.stderr.startswith(f"warning: {NOTE}")
    assert spo("config", CONFIG).stderr == ""


@pytest.mark.integration
@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_the_first_rank_alone_names_what_has_no_effect(rank: str, times: int) -> None:
    nowhere = ("-o", "broker.wait=0", "-o", "broker.url=redis://127.0.0.1:1/0")
    ran = start("learner.cli", "-c", CONFIG, "-o", NO_EFFECT, *nowhere, RANK=rank)
    assert ran.returncode == 2
    assert ran.stderr.count(NOTE) == times


@pytest.mark.integration
@pytest.mark.parametrize("plain", [["--plain"], []])
def test_a_run_names_what_has_no_effect_before_it_starts(plain: list[str], tmp_path: Path) -> None:
    own = ("-o", f"run.output_dir={tmp_path}", "-o", NO_EFFECT, "--redis", "redis://127.0.0.1:1/0")
    # Without --plain, FORCE_COLOR makes this a terminal: the log is a file then, and the note on the screen too.
    terminal = {"FORCE_COLOR": "" if plain else "1", "COLUMNS": "120"}
    ran = start("launcher.cli", "run", CONFIG, *plain, "-o", "broker.wait=0", *own, **terminal)
    assert ran.returncode == 2
    log = ran.stderr if plain else (tmp_path / "arithmetic" / "logs" / "launcher.log").read_text()
    assert log.count(NOTE) == 1
    assert ran.stdout.replace("\n", " ").count("kl_estimator = 'k2' has no effect") == (0 if plain else 1)
