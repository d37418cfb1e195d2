"""Every configuration that cannot work is one line that names the key, the value and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, load_config
from common.config.correction import REJECTION_MODES
from common.config.load import ConfigLoader
from common.config.names_elsewhere import ELSEWHERE
from common.config.section import keys_of
from common.errors import UserError
from tests.support.checks import config_of


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        config_of(**yaml.load(text, ConfigLoader))
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_ANSWERS = "data: {train: t, answer_column: null}"
# What is written, and the words of the line, separated by " | ".
SECTIONS = [
    ("learner: {lrr: 1}", "unknown configuration key learner.lrr; did you mean learner.lr?"),
    ("lerner: {lr: 1}", "unknown configuration key lerner; did you mean learner?"),
    ("sampler: {tracker: {zzz: 1}}", "sampler.tracker.zzz; allowed: kind, kind_options, rho_min, rho_max"),
    ("data: {train: [a.jsonl, {path: b.jsonl}]}", "data.train[0] = 'a.jsonl' is a section, not a value"),
    ("data: {train: t, template_options: {tools: []}}", "data.template_options: 'tools' is set by SPO itself"),
    ("data: {train: t, answer_column: null}", "data.train has no answers | episode.reward = 'exact' compares"),
    ("{data: {train: [{path: a, episode: {reward: code}}], answer_column: null}, episode: {reward: length}}",
     "data.train[a] has no answers | 'code' compares with them"),
    (f"{{{NO_ANSWERS}, episode: {{reward: judge, reward_options: {{judge: {{model: m}}}}}}}}", "'judge' compares with"),
    ("{data: {train: t, answer_column: null, answer_after: x}, episode: {reward: length}}", "answer_after = 'x' looks"),
    (f"{{{NO_ANSWERS}, episode: {{reward: length}}, teacher: {{context: 'a {{answer}}'}}}}", "context names {answer}"),
    ("learner: {lr: fast}", "learner.lr = 'fast'"),
    ("generator: {max_concurrency: many}", "key generator.max_concurrency = 'many': | an integer, or 'auto'"),
    ("run: {name: a b}", "run.name = 'a b'"),
    ("run: {experiment: ../../etc}", "must be a folder below run.output_dir"),
    ("run: {experiment: /etc}", "to write elsewhere, set run.output_dir"),
    ("run: {stop_when: 0}", "run.stop_when = 0 | greater than or equal to 1"),
    ("run: {stop_when: 3}", "run.stop_when = 3 compares evaluations made during training; set data.heldout and"),
    ("{data: {train: t, heldout: h}, eval: {every: 0}, run: {stop_when: 3}}", "eval.every of 1 or more, or leave"),
    ("sampler: {tracker: {rho_min: 0.97}}", "rho_max = 0.96"),
    ("sampler: {tracker: {reward_range: [1, 0]}}", "sampler.tracker.reward_range = [1.0, 0.0] is empty"),
    ("eval: {right_from: 0}", "eval.right_from = 0.0 would call every answer right, or none; give a reward above 0,"),
    ("{sampler: {batch_size: 10}, learner: {mini_batches: 3}}", "make it a multiple"),
    ("data: {train: t, max_prompt_tokens: 4096}", "model.max_model_len = 4096"),
    ("generator: {temperature: 0.7}", "generator.temperature = 0.7 | sampler.drift.mode=ledger"),
    ("{generator: {temperature: 0}, sampler: {drift: {mode: ledger}}}", "use a value above 0"),
    ("learner: {offload: all}", "zero_stage=3 (given: 0)"),
    ("broker: {url: 'localhost:6379'}", "must start with redis:// | did you mean redis://localhost:6379/0?"),
    ("broker: {url: 'me:secret@far:1'}", "broker.url = 'me:***@far:1' | did you mean redis://me:***@far:1/0?"),
    ("learner: {weights: {bind: 'tcp://0.0.0.0:5555'}}", "is open to the network without keys | spo keys"),
    ("learner: {weights: {relay: node-1}}", "auto, direct, or a relay's tcp://host:port"),
    ("sandbox: {url: 'http://here:70000'}", "no valid port"),
    ("sandbox: {url: 'http://here:0'}", "no valid port"),
    ("{generator: {temperature: 0.7}, sampler: {drift: {mode: ledger}}, teacher: {url: 'http://x/v1'}}",
     "teacher.url = 'http://x/v1' | scores prompts at temperature 1, but generator.temperature = 0.7"),
    ("teacher: {url: 'http://me:secret@x/v1'}", "teacher.url = 'http://me:***@x/v1' has a password"),
    # Methods.
    ("{algorithm: {method: grpo}, sampler: {batch_size: 20}}", "batch_size = 20 is not | algorithm.group_size = 8"),
    ("algorithm: {method: rloo, advantage: grpo}", "algorithm.advantage = 'grpo' belongs to another method"),
    ("algorithm: {baseline: critic, advantage: 'a:b'}", "algorithm.advantage = 'a:b' has no effect with"),
    ("algorithm: {method: rloo, turn_advantage: turn}", "algorithm.turn_advantage = 'turn' has no baseline with"),
    ("{algorithm: {method: grpo, baseline: critic}, sampler: {drift: {mode: ledger}}}", "algorithm.baseline ="),
    ("{algorithm: {baseline: critic}, learner: {sequence_parallel: 2}}", "learner.sequence_parallel = 2: the critic"),
    ("{algorithm: {baseline: both}, learner: {lora: {}}}", "algorithm.baseline = 'both' with learner.lora"),
    ("critic: {gae_lambda: 1.5}", "critic.gae_lambda = 1.5"),
    # Options of losses.
    ("algorithm: {loss_options: {beta: 1}}",
     "algorithm.loss_options.beta is not an option of loss 'ppo_clip'; allowed:"),
    ("algorithm: {loss: dro, loss_options: {beta: 0}}", "loss_options.beta = 0 of loss 'dro' must be a number in (0,"),
    ("algorithm: {loss: kl_cov, loss_options: {ratio: 1.5}}", "ratio = 1.5 | in (0, 1]"),
    ("algorithm: {loss: 'my:loss', clip_high: 2}", "make it an option of 'my:loss', in loss_options"),
    ("algorithm: {clip_low: -1}", "algorithm.loss_options.low = -1 of loss 'ppo_clip' must be a number in (0, inf)"),
    ("algorithm: {loss: clip_cov, loss_options: {cov_low: 6}}", "cov_low = 6 is above cov_high = 5"),
    # Names of verl's and SkyRL's.
    ("algorithm: {rollout_correction: {rollout_is: tokens}}", "key algorithm.correction.rollout_is = 'tokens'"),
    ("algorithm: {rollout_correction: null, correction: {}}", "verl's name for correction; give one of the two"),
    # Episodes.
    ("episode: {tools: [calculator], max_assistant_turns: 1}", "episode.tools are never answered with"),
    ("episode: {user: corrector, max_assistant_turns: 2, max_user_turns: 0}", "set episode.user=null"),
    ("episode: {call_format: code}", "episode.tools=[code_interpreter]"),
    ("episode: {tool_options: {calculator: {x: 1}}}", "tool_options names 'calculator' | (none)"),
    ("episode: {user_options: {x: 1}}", "without episode.user"),
    ("episode: {reward: {exact: .inf}}", "the weight of 'exact' is inf"),
    ("episode: {reward_options: {math: {}}}", "reward_options names 'math', which is not part of | (exact)"),
    ("{algorithm: {turn_advantage: turn}, episode: {turn_rewards: mean}}", "episode.turn_rewards = 'mean' does not"),
    # Agents.
    ("episode: {agent: {}}", "key episode.agent: give either a `function`"),
    ("episode: {agent: {command: python agent.py}}", "episode.agent.command = 'python agent.py' | valid list"),
    ("episode: {agent: {environment: 'host:5000'}}", "agent.environment: 'host:5000' is not of | tcp://host:port"),
    ("episode: {agent: {environment: 'tcp://h:5'}}", "episode.reward = 'exact' leaves out the environment's | =agent"),
    ("episode: {agent: 5}", "episode.agent = 5 is a section, not a value | function, command"),
    ("episode: {agent: {function: 'a:b', failure: skip}}", "agent.failure: 'skip' is neither retry nor a reward"),
    ("episode: {agent: {function: 'a:b', failure: 2}}", "failure = 2.0 is outside | [0, 1]; give a reward within it"),
    ("episode: {agent: 'a:b', tools: [calculator]}", "episode.tools = ['calculator'] beside | set episode.tools=[]"),
    ("{episode: {agent: 'a:b'}, algorithm: {turn_advantage: turn}}", "set algorithm.turn_advantage=episode"),
    ("{episode: {agent: 'a:b'}, run: {deterministic: true}}", "episode.agent = 'a:b' contradicts run.deterministic"),
    ("episode: {reward: {exact: 1, agent: 1}}", "episode.reward = 'agent' is the number | episode.agent is null"),
    ("{episode: {tools: [calculator], max_assistant_turns: 2}, data: {train: [{path: a, episode: {agent: 'a:b'}}]}}",
     "data.train[a]: episode.tools = ['calculator'] beside episode.agent"),
    # Adapters.
    ("learner: {lora: {targets: q_proj}}", "'q_proj' is neither all-linear nor a list of names"),
    ("{learner: {lora: {}}, generator: {engine: {max_lora_rank: 8}}}", "max_lora_rank = 8 is below learner.lora.rank"),
    # Mixtures of experts.
    ("{learner: {router_replay: rollout}, generator: {engine: {enable_prefix_caching: false}}}",
     "learner.router_replay = 'rollout' needs vLLM's prefix cache | generator.engine.enable_prefix_caching = False"),
    # Teachers.
    ("teacher: {model: a, url: 'http://h/v1'}", "teacher.model and teacher.url are set, but a sample has one teacher"),
    ("teacher: {model: a, context: b}", "teacher.model and teacher.context are set | keep one of them"),
    ("teacher: {model: a, top_k: 8}", "teacher.top_k = 8 with teacher.form = 'advantage' | set teacher.form=loss"),
    ("{teacher: {context: '{answer}'}, generator: {temperature: 0.7}, sampler: {drift: {mode: ledger}}}",
     "generator.temperature = 0.7 beside teacher.context | set it to 1, or set teacher.model"),
    ("teacher: {reward: false}", "teacher.reward = false leaves nothing to learn from without a teacher"),
    ("teacher: {context: 'a {'}", "teacher.context = 'a {' cannot be filled in | double braces that are text"),
    ("teacher: {context: 'a {b:>4}'}", "the field 'b' has options; give its name alone"),
    ("{teacher: {context: '{answer}'}, episode: {agent: 'a:b'}}", "teacher.context beside episode.agent | or"),
    ("data: {train: [{path: b, teacher: {model: a, context: c}}]}", "data.train[b]: teacher.model and teacher.context"),
    ("data: {train: [{path: b, teacher: {weight: 2}}]}", "data.train[b].teacher.weight cannot be set for one source"),
    # Data.
    ("data: {train: []}", "data.train"),
    ("data: {train: [{path: b.jsonl, weight: 0}]}", "data.train[b.jsonl].weight = 0: input should be greater than 0"),
    ("data: {train: [{name: b}]}", "data.train[b].path is missing"),
    ("data: {train: [{path: a.jsonl}, {path: x/a.jsonl}]}", "data.train has 2 sources named 'a'; give each a `name`"),
    ("data: {train: [{path: b.jsonl, name: a/b}]}", "data.train[a/b].name = 'a/b': string should match"),
    ("data: {train: [{path: b.jsonl, format: gsm8}]}", "'gsm8' is not a set that is known by name; did you mean gsm8k"),
    ("data: {train: [{path: b, episode: {rewrd: math}}]}", "[b].episode.rewrd; did you mean data.train[b].episode.rew"),
    ("data: {train: [{path: b, episode: {rollouts_every: 1}}]}", "data.train[b].episode.rollouts_every cannot"),
    # Deterministic runs.
    ("{run: {deterministic: true}, sampler: {max_staleness: 2}}", "sampler.max_staleness = 2 contradicts run.determ"),
    ("{run: {deterministic: true}, generator: {max_concurrency: 64}}", "generator.max_concurrency = 64 contradicts"),
    ("{run: {deterministic: true}, generator: {engine: {enable_prefix_caching: true}}}", "engine.enable_prefix_cachin"),
    ("{run: {deterministic: true}, episode: {max_seconds: 60}}", "episode.max_seconds = 60.0 contradicts | set null"),
    ("{run: {deterministic: true}, algorithm: {method: grpo}, sampler: {drift: {mode: rescore}}}",
     "sampler.drift.mode = 'rescore' contradicts | set constant"),
]  # fmt: skip
MODES = " | ".join(REJECTION_MODES)
# `algorithm.correction`, and beside it what `algorithm` has.
CORRECTIONS = [
    ("decoupled", "is a section, not a value | (for a preset: algorithm.correction.preset=decoupled)"),
    ("{rollout_is_threshold: 0}", "rollout_is_threshold = 0 | above 0"),
    ("{rollout_is_threshold: 5_0.5}", "rollout_is_threshold = '5_0.5' | lower 5 is above upper 0.5"),
    ("{rollout_rs: seq_max_k1, rollout_rs_threshold: 2}", f"'seq_max_k1' is not a mode | {MODES}"),
    ("{rollout_rs: token_k1}", "rollout_rs = 'token_k1' needs rollout_rs_threshold | null"),
    ("{rollout_rs: 'token_k1,token_k2,token_k3', rollout_rs_threshold: '2,3'}",
     "2 parts for 3 modes | or one for each"),
    ("{rollout_is_mode: cut}", "rollout_is_mode = 'cut' | truncate, mask and clip"),
    ("{rollout_rs: token_k2, rollout_rs_threshold: 0.5_2}", "'0.5_2' | token_k2 takes an upper bound alone"),
    ("{thresholds_by_age: [1, 1, 1, 1, 0]}", "thresholds_by_age = [1.0, 1.0, 1.0, 1.0, 0.0] | above 0"),
    ("{skyrl: {geo_mask_low: 2}}", "geo_mask_low = 2.0 is above geo_mask_high = 1.01"),
    ("{preset: decoupled_token_iss}", "preset 'decoupled_token_iss' is unknown; did you mean decoupled_token_is"),
    # Contradictions.
    ("{bypass_mode: true}, proximal: recompute",
     "proximal = 'recompute' contradicts correction, which implies 'rollout'"),
    ("{skyrl: {}, rollout_is: token}", "give one of the two"),
    ("{rollout_is: null, rollout_is_batch_normalize: true}", "rollout_is_batch_normalize = true has no"),
    ("{rollout_is: null, rollout_rs_threshold: 2}", "rollout_rs_threshold = 2.0 bounds nothing while rollout_rs"),
    # Former names beside today's.
    ("{rollout_is_level: token, rollout_is: sequence}", "rollout_is_level = 'token' | rollout_is (given: 'sequence')"),
    ("{rollout_rs: token_k1, rollout_rs_threshold: 0.5_2, rollout_rs_threshold_lower: 0.4}", "rollout_rs_threshold_lo"),
    ("{use_pure_rollout_correction: true, loss_type: ppo_clip}", "use_pure_rollout_correction | loss_type"),
    ("{rollout_is_level: geometric}", "'geometric' | token, sequence | seq_mean_k1"),
]  # fmt: skip
SENTINELS = [
    ("redis+sentinel://a:1,b:2", "it names no SERVICE, the sentinels' name for the master"),
    ("redis+sentinel:///spo/0", "'' is not HOST:PORT"),
    ("rediss+sentinel://a:1/spo/0?ssl_check_hostname=no", "ssl_check_hostname=no must be true or false"),
]
FORM = "it must be of the form redis+sentinel://HOST:PORT,"
ROWS = [
    *SECTIONS,
    *((f"algorithm: {{correction: {text}}}", words) for text, words in CORRECTIONS),
    *((f"broker: {{url: '{url}'}}", f"broker.url = | {why} | {FORM}") for url, why in SENTINELS),
]


@pytest.mark.parametrize(("text", "words"), ROWS, ids=[text for text, _ in ROWS])
def test_a_refusal_is_one_line_with_key_value_and_remedy(text: str, words: str) -> None:
    line = refusal(text)
    assert [part for part in words.split(" | ") if part not in line] == []


PATHS = "data: {train: [{path: a.jsonl}, {path: b.jsonl, name: hard}]}\nmodel: {path: m}\n"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_a_name_of_another_trainer_leads_to_keys_that_exist(name: str) -> None:
    keys = set(keys_of(Config))
    known = keys | {key.rpartition(".")[0] for key in keys} | {"data.train", "data.heldout"}
    sections = "|".join(Config.model_fields)
    mentioned = re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", ELSEWHERE[name])
    assert mentioned or "spo run" in ELSEWHERE[name]
    assert set(mentioned) <= known
    assert name not in keys


# A file, or None; overrides and the environment; the refusal.
LOADS: list[tuple[str | None, list[str], dict[str, str], str]] = [
    ("a: [", [], {}, "line"),
    ("- 1", [], {}, "mapping"),
    ("", [], {}, "mapping"),
    ("model: {path: m}\nlearner:\n  lr: 1\n  lr: 2\n", [], {},
     "line 4 is not valid YAML: key 'lr' is already on line 3"),
    ("model:\n\tpath: m\n", [], {}, "line 2 is not valid YAML: .*; indent by spaces, not by tabs"),
    ("model:\n  path: !!int many\n", [], {}, "line 2 is not valid YAML: 'many' cannot be read as int"),
    (f"model: {{path: {'1' * 5000}}}\n", [], {}, "line 1 is not valid YAML: '1+' cannot be read as int"),
    ("a: " + "[" * 3000, [], {}, "is not valid YAML: its lists or mappings are nested too deep"),
    (PATHS, ["learner.lr=" + "[" * 3000], {}, "learner.lr = .*should be a valid number"),
    (PATHS, ["algorithm.loss=[gspo]"], {}, "algorithm.loss = .*should be a valid string"),
    (PATHS, ["algorithm.loss={name: gspo}"], {}, "algorithm.loss = .*should be a valid string"),
    (PATHS, ["sampler.tracker.reward_range=[0, .inf]"], {}, r"reward_range = \[0.0, inf\] cannot be rescaled"),
    (PATHS, [f"model.path={'x' * 300}"], {}, "model.path = 'x+' cannot be read: File name too long"),
    (PATHS, ["data.train.hard.episode={nam: 3}"], {}, r"^unknown configuration key data.train\[hard\](?!.*Indent)"),
    ("a: &a [1, *a]\n", [], {}, "line 1 is not valid YAML: its aliases expand to more than 100,000 values"),
    (None, [], {}, "run.yaml: No such file"),
    (PATHS, ["nonsense"], {}, "section.key=value"),
    (PATHS, ["model.path.deep=1"], {}, "is a value, not a section"),
    (PATHS, ["data.train.soft.weight=2"], {}, r"data\.train\.soft is a value, not a section"),
    (PATHS, ["data.train.2.weight=2"], {}, r"data\.train\.2 is a value, not a section"),
    (PATHS, ["data.train.hard=2"], {}, r"data\.train is a list; set a key of one of its items"),
    (PATHS, [], {"SPO__LEARNER__LRR": "1"}, r"mean learner.lr\? \(set by SPO__LEARNER__LRR in the environment\)"),
    (PATHS, ["learner.trunk=1"], {"SPO__RUN": "{steps: 3}"}, r"^unknown configuration key learner.trunk;(?!.*set by)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "environ", "words"), LOADS)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, text: Any, overrides: Any, environ: Any, words: str) -> None:
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        load_config(tmp_path / "run.yaml", overrides, environ)
