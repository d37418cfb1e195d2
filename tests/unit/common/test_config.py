"""Configuration: every mistake is one sentence that names the key and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import differences, dump_config, load_config, parse_config
from common.errors import UserError, reports_user_errors

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


GOOD = "model: {path: m}\ndata: {train: t.jsonl}\n"


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "learner: {lr: 1.0e-6, grad_clip: 2.0}\nrun: {steps: 5}\n")
    config = load_config(path, ["learner.lr=3e-6"], {"SPO__LEARNER__LR": "2e-6", "SPO__RUN__STEPS": "7"})
    assert (config.learner.lr, config.learner.grad_clip, config.run.steps) == (3e-6, 2.0, 7)


def test_the_resolved_file_reads_back_the_same(tmp_path: Path) -> None:
    config = parse_config(BASE | {"run": {"modules": str(tmp_path)}})
    assert load_config(write(tmp_path, dump_config(config)), (), {}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner: {lrr: 1}", "unknown configuration key learner.lrr; did you mean learner.lr?"),
        ("lerner: {lr: 1}", "unknown configuration key lerner; did you mean learner?"),
        ("sampler: {tracker: {zzz: 1}}", "sampler.tracker.zzz; allowed: rho_min, rho_max, half_life, reward_range"),
        ("learner: {lr: fast}", "learner.lr = 'fast'"),
        ("learner: {zero_stage: 7}", "learner.zero_stage = 7"),
        ("algorithm: {proximal: sideways}", "'rollout', 'interpolate' or 'compare'"),
        ("run: {name: 'a b'}", "run.name = 'a b'"),
        ("model: 3", "model = 3"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, message: str) -> None:
    base = "" if text.startswith("model") else "model: {path: m}\n"
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, f"{base}data: {{train: t.jsonl}}\n{text}\n"), (), {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampler.tracker.rho_min=0.97"], "rho_max"),
        (["sampler.tracker.reward_range=[1, 0]"], "reward_range"),
        (["sampler.batch_size=10", "learner.mini_batches=3"], "multiple"),
        (["data.max_prompt_tokens=4096"], "max_model_len"),
        (["generator.temperature=0.7"], "sampler.drift.mode=ledger"),
        (["generator.top_p=0.9"], "generator.top_p = 0.9"),
        (["generator.top_k=20", "sampler.drift.mode=ledger"], "every importance ratio would be off"),
        (["sampler.drift.estimator=k3", "sampler.drift.mode=ledger"], "estimator=abs"),
        (["generator.temperature=0", "sampler.drift.mode=ledger"], "above 0"),
        (["learner.offload_params=true"], "zero_stage=3"),
        (["learner.offload_optimizer=true"], "zero_stage"),
        (["episode.tools=[calculator]"], "max_assistant_turns = 1"),
        (["episode.tools=[calculator]", "episode.max_assistant_turns=2", "episode.max_user_turns=0"], "max_user_turns"),
        (["episode.user=corrector"], "episode.user = 'corrector' is never answered"),
        (["episode.user=corrector", "episode.max_assistant_turns=2", "episode.max_user_turns=0"], "episode.user=null"),
        (["episode.call_format=code"], "episode.tools=[code_interpreter]"),
        (
            ["episode.call_format=code", "episode.tools=[calculator]", "episode.max_assistant_turns=2"],
            "episode.call_format=hermes",
        ),
        (["episode.tool_options={calculator: {x: 1}}"], "tool_options names 'calculator'"),
        (["episode.user_options={x: 1}"], "without episode.user"),
        (["algorithm.turn_advantage=turn", "episode.turn_rewards=mean"], "episode.turn_rewards = 'mean' does not"),
        (["broker.dead_after=1"], "heartbeat"),
        (["broker.url=http://x"], "redis://"),
        (["learner.weights.bind=tcp://0.0.0.0:5555"], "spo keys"),
        (["learner.weights.bind=ipc://x"], "tcp://host:port"),
        (["learner.weights.bind=tcp://127.0.0.1:99999"], "port 1 to 65535"),
        (["learner.weights.advertise=tcp://here:0"], "tcp://host:port"),
        (["learner.weights.relay=tcp://here:70000"], "a relay's tcp://host:port"),
        (["sandbox.url=http://here:70000"], "no valid port"),
        (["run.experiment=../../etc"], "must be a folder below run.output_dir"),
        (["run.experiment=/etc"], "to write elsewhere, set run.output_dir"),
        (["run.experiment=."], "run.output_dir"),
        (["learner.weights.relay=node-1"], "auto, direct, or a relay's tcp://host:port"),
        (["nonsense"], "section.key=value"),
        (["run.steps.deep=1", "run.steps.deep.er=1"], "is a value, not a section"),
    ],
)
def test_impossible_combinations_name_the_fix(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, GOOD), overrides, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line"),
        ("- 1", "mapping"),
        ("", "mapping"),
        (
            "model: {path: m}\nlearner:\n  lr: 1\n  lr: 2\n",
            "line 4 is not valid YAML: key 'lr' stands on line 3 already",
        ),
        ("model: {path: m}\nmodel: {path: n}\n", "line 2 .* key 'model' stands on line 1 already"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(write(tmp_path, text), (), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml", (), {})


def test_processes_may_differ_in_what_is_local_and_nothing_else() -> None:
    theirs = json.loads(json.dumps(parse_config(BASE).model_dump(mode="json")))
    ours = parse_config(
        BASE | {"broker": {"url": "redis://elsewhere"}, "generator": {"max_concurrency": 3}, "learner": {"lr": 1}}
    )
    assert [str(one) for one in differences(ours, theirs)] == ["learner.lr (here 1.0, in the run 1e-06)"]


def test_a_user_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        raise UserError("several\nlines")

    with pytest.raises(SystemExit) as caught:
        reports_user_errors(app)()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: several lines\n"


@pytest.mark.integration
def test_common_and_sampler_import_without_torch() -> None:
    code = (
        "import sys, common.config, common.streams.ledger, sampler.cli;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_wrong_value_from_the_environment_names_its_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {train: t.jsonl}\n")
    with pytest.raises(UserError, match=r"did you mean learner.lr\? \(set by SPO__LEARNER__LRR in the environment\)"):
        load_config(path, (), {"SPO__LEARNER__LRR": "1"})


def test_a_value_in_the_place_of_a_section_is_told_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {train: t.jsonl}\n")
    with pytest.raises(UserError, match="learner = 3 is a section, not a value; give one of its keys: lr, schedule"):
        load_config(path, ["learner=3"], {})


@pytest.mark.parametrize("key", ["deltas", "shared_folder"])
def test_off_is_a_word_though_yaml_reads_it_as_false(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: m}}\ndata: {{train: t}}\nlearner: {{weights: {{{key}: off}}}}\n")
    assert getattr(load_config(file, (), {}).learner.weights, key) == "off"
    file.write_text("model: {path: m}\ndata: {train: t}\n")
    assert getattr(load_config(file, (f"learner.weights.{key}=off",), {}).learner.weights, key) == "off"
