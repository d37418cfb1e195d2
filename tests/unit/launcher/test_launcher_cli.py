"""The `spo` command: what it prints, and that what cannot work is one line and exit code 2."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.metadata import entry_points, version
from pathlib import Path
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

import generator.cli
import launcher.cli
import learner.cli
import relay.cli
import sampler.cli
import sandbox_client.cli
from common.checks.check import Check, Need, When, ok
from common.config import SelectionConfig, load_config
from common.errors import UserError
from launcher import chaos
from launcher.checks import command as checks
from launcher.cli import GROUPS
from launcher.quickstart import command, inputs
from launcher.tasks import TASKS
from launcher.tasks.task import QuickstartTask
from tests.support.checks import run_file, small_model
from tests.support.episode_rows import keep
from tests.support.run_folder import finished_run
from tests.support.sampler import write_prompts, write_rows
from tests.support.spo_command import Spo

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "arithmetic.yaml"


def test_config_prints_every_key_with_overrides_applied(spo: Spo) -> None:
    ran = spo("config", CONFIG, "-o", "run.steps=7")
    assert ran.returncode == 0
    printed = yaml.safe_load(ran.stdout)
    assert printed["run"]["steps"] == 7
    assert printed["broker"]["dead_after"] > 0


def test_a_key_is_explained_found_and_completed(spo: Spo) -> None:
    lines = dict(line.split(None, 1) for line in spo("config", "--explain", "learner.lr").stdout.splitlines())
    assert (lines["type"], lines["default"]) == ("float, > 0", "1e-06")
    assert lines["meaning"].endswith("May change.")
    literal = spo("config", "--explain", "sampler.drift.mode").stdout
    assert "rescore | ledger | constant" in literal
    assert "docs/extending.md, docs/configuration.md" in spo("config", "--explain", "algorithm.loss").stdout
    section = spo("config", "--explain", "sampler.selection").stdout
    assert [line.split()[0].rpartition(".")[2] for line in section.splitlines()] == [*SelectionConfig.model_fields]
    assert "data.train[].weight " in spo("config", "--explain", "data.train[]").stdout
    found = spo("config", "--search", "CHECKPOINTS").stdout.splitlines()
    assert {"learner.keep_checkpoints", "learner.checkpoint_every"} <= {line.split()[0] for line in found}
    for asked, words in {
        ("--explain", "learner.lrr"): "nearest: learner.lr",
        ("--explain", "epsilon"): "nearest: sampler.selection.epsilon",
        ("--explain", "adv_estimator"): "nearest: algorithm.method",
        ("--search", "zzz"): "no key has this",
        (): "name a configuration",
    }.items():
        refused = spo("config", *asked)
        assert (refused.returncode, words in refused.stderr, refused.stderr.count("\n")) == (2, True, 1)
    shell = {"COMP_WORDS": "spo run my.yaml -o learner.lr", "COMP_CWORD": "4", "_SPO_COMPLETE": "complete_bash"}
    ran = CliRunner().invoke(launcher.cli.app, [], env=shell, prog_name="spo")
    assert ran.stdout.split() == ["learner.lr="]


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], True),
        (["--redis", "embedded"], True),
        (["-o", "broker.url=redis://127.0.0.1:1/0"], False),
        (["--redis", "redis://127.0.0.1:1/0"], False),
        (["--role", "sampler"], False),
    ],
)
def test_the_doctor_looks_for_the_redis_that_a_run_would_use(
    options: list[str], own: bool, spo: Spo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (Check("queue", lambda _: ok("asked"), When.DOCTOR, needs=Need.REDIS),))
    monkeypatch.setattr(checks, "_dry_run_checks", lambda _: [])
    ran = spo("doctor", "-c", CONFIG, *options)
    assert ("will be started" in ran.stdout, "queue" in ran.stdout) == (own, not own)


def test_help_teaches_by_examples(spo: Spo) -> None:
    names = ("quickstart", "run", "prepare", "status", "dead", "keys", "config", "audit", "chaos")
    for name in (*names, "correction list", "correction show", "correction explain"):
        ran = spo(*name.split(), "--help")
        assert ran.returncode == 0
        assert f"spo {name}" in ran.stdout.replace("Usage:", ""), name
    words = " ".join(spo("quickstart", "--help").stdout.replace("│", "").split())
    assert all(f"{task.name}, {task.summary}" in words for task in TASKS.values())


def test_help_shows_every_command_in_its_group(spo: Spo) -> None:
    lines = spo("--help").stdout.splitlines()
    titles = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert titles == ["Options", "Run", "Look", "Check", "Data", "Model"]
    rows = lines[next(i for i, line in enumerate(lines) if "─ Run ─" in line) :]
    names = [line.split()[1] for line in rows if line.startswith("│ ")]
    assert names == [name for commands in GROUPS.values() for name, _, _ in commands]


def test_chaos_needs_a_checkout(spo: Spo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "CHECKOUT", tmp_path)
    ran = spo("chaos", "--minutes", "1")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "needs a source checkout" in ran.stderr


def test_what_is_prepared_can_be_run_as_the_help_says(
    tmp_path: Path, spo: Spo, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def cached_model(task: QuickstartTask, *_: object) -> Path:
        made.append((task.name, task.recipe.experts))
        return small_model(tmp_path / f"cached {len(made)}", (2, 2))

    monkeypatch.setattr(command, "cached_model", cached_model)
    assert spo("prepare", "mixture", "--task", "code", "--experts", "4").returncode == 0
    assert spo("prepare", "small").returncode == 0
    assert made == [("code", 4), ("arithmetic", 0)]
    assert spo("prepare", "my #1: small").returncode == 0
    for name in ("small", "my #1: small"):
        config = load_config(tmp_path / name / "run.yaml", (), {})
        assert all(Path(path).exists() for path in (config.model.path, config.data.train, config.data.heldout))


def test_keys_are_written_once(tmp_path: Path, spo: Spo) -> None:
    assert spo("keys", tmp_path / "keys").stdout.count("\n") == 4
    assert spo("keys", tmp_path / "keys").returncode == 2


def test_quickstart_folders_have_the_tasks_name_and_a_number(tmp_path: Path) -> None:
    code = TASKS["code"]
    assert [inputs.fresh_folder(tmp_path).name for _ in range(2)] == ["quickstart-1", "quickstart-2"]
    names = [inputs.fresh_folder(tmp_path, code).name for _ in range(2)]
    assert names == ["quickstart-code-1", "quickstart-code-2"]
    config = inputs.quickstart_config(tmp_path / names[0], 0, None, task=code)
    assert (config.run.name, config.episode.tools) == (names[0], ["code_interpreter"])


def test_the_quickstart_runs_the_published_configuration(tmp_path: Path) -> None:
    config = inputs.quickstart_config(tmp_path / "quickstart-3", seed=5, steps=None, overrides=["eval.every=3"])
    published = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    assert (config.learner.lr, config.run.steps) == (published["learner"]["lr"], published["run"]["steps"])
    assert (config.run.seed, config.run.name, config.eval.every) == (5, "quickstart-3", 3)
    assert Path(config.data.train).parent == tmp_path / "quickstart-3" / "inputs"


@pytest.mark.parametrize("output", ["my #1 runs", "2024-01-01", "2024-13-45", "7", "a: b", "[x", "~"])
def test_the_quickstart_s_folder_may_have_any_name(output: str) -> None:
    config = inputs.quickstart_config(Path(output) / "quickstart-1", seed=5, steps=None)
    assert config.run.folder == Path(output) / "quickstart-1"
    assert config.model.path == f"{output}/quickstart-1/inputs/model"


def test_files_that_cannot_be_copied_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = shutil.Error([("model/a", "inputs/a", "[Errno 28] No space left on device")])
    monkeypatch.setattr(inputs.shutil, "copytree", mock.Mock(side_effect=failed))
    with pytest.raises(UserError, match="cannot write to .*No space left on device"):
        inputs.write_inputs(tmp_path, tmp_path, 0)


APPS = {
    "spo": launcher.cli.app,
    "spo-sampler": sampler.cli.app,
    "spo-generator": generator.cli.app,
    "spo-learner": learner.cli.app,
    "spo-relay": relay.cli.app,
    "spo-sandbox": sandbox_client.cli.app,
}


def test_these_are_all_commands_of_the_package() -> None:
    ours = {point.name for point in entry_points(group="console_scripts") if point.dist.name == "spo-trainer"}
    assert ours == set(APPS)


@pytest.mark.parametrize("name", APPS)
def test_each_has_a_version_and_a_short_option_for_help(name: str) -> None:
    asked = CliRunner().invoke(APPS[name], ["--version"])
    assert (asked.exit_code, asked.output.split()) == (0, ["spo-trainer", version("spo-trainer")])
    short, long = (CliRunner().invoke(APPS[name], [option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize(
    ("option", "address"),
    [
        ("--bind", "127.0.0.1:5555"),
        ("--bind", "tcp://127.0.0.1:70000"),
        ("--bind", "tcp://127.0.0.1/x:5555"),
        ("--advertise", "tcp://node-1:0"),
        ("--advertise", "tcp://node-1"),
        ("--upstream", "tcp://node-1:70000"),
        ("--upstream", "tcp://node-1:*"),
    ],
)
def test_an_address_of_a_relay_that_can_never_work_is_refused(option: str, address: str) -> None:
    ran = CliRunner().invoke(APPS["spo-relay"], ["-c", str(CONFIG), option, address])
    assert isinstance(ran.exception, UserError)
    assert str(ran.exception).startswith(f"{option} = {address!r} must be of the form tcp://host:port (port 1 to")


# What cannot be.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, runs and configurations that the commands name."""
    folder = tmp_path_factory.mktemp("refused")
    for name in ("one", "two", "runs/quickstart-1"):
        finished_run(folder / name)
    keep(folder / "one", 10, "e0-a-0", where="validation_data")
    for name in ("nothing", "good.run", "v.run"):  # beside NAME.jsonl, the run that answers it
        (folder / name).mkdir()
    (folder / "good.run/lock").touch()
    write_prompts(folder / "train.jsonl", "train", 5)
    scores = {"good": [("a", 1), ("a", 0)], "minus": [("a", 1), ("b", -1)], "empty": []}
    for name, rows in scores.items():
        scored = [{"task_id": "values0-x", "input": prompt, "score": score} for prompt, score in rows]
        write_rows(folder / f"{name}.jsonl", *scored)
    write_rows(folder / "odd.jsonl", {"frage": "1?", "antwort": 1})
    (folder / "list.json").write_text("[]")
    data = {"train": str(folder / "train.jsonl")}
    run_file(folder, data=data).rename(folder / "plain.yaml")
    run_file(folder, data=data, episode={"agent": "tests.support.agents:scripted"}).rename(folder / "agent.yaml")
    return folder


# CONFIG is the path of a configuration, without .yaml. Others are on docs/troubleshooting.md, whose test gives them.
LONG = "x" * 300  # no folder has such a name
REFUSALS = [
    ("run CONFIG.yaml -o run.steps=2 learner.lr=1 'episode.tools=[a, b]'", "set by -o learner.lr=1 -o 'episode.t"),
    ("config CONFIG.yaml run.steps=2", "a key of the configuration is set by -o run.steps=2"),
    ("data check CONFIG.yaml run.steps=2", "a key of the configuration is set by -o run.steps=2"),
    ("doctor -c CONFIG.yaml -o run.steps 2", "a key of the configuration is set by -o run.steps=2"),
    ("doctor CONFIG.yaml", "the configuration is given by -c CONFIG.yaml"),
    ("run CONFIG.yaml other.yaml", "run --help"),
    ("run CONFIG.yml", "No such file or directory; did you mean CONFIG.yaml?"),
    ("config CONFIG", "did you mean CONFIG.yaml?"),
    ("config ROOT/configs/arithmatic.yaml", "did you mean CONFIG.yaml?"),
    ("config ROOT/configs/environment", "Is a directory; did you mean"),
    ("config ROOT/tests", "Is a directory; give a YAML file, not a folder"),
    ("config CONFIG.yaml -o algorithm.loss=ppo_clp", "loss = 'ppo_clp' is unknown; did you mean ppo_clip?"),
    ("quickstart -o learner.zero_stage=9", "learner.zero_stage"),
    ("quickstart --redis redis://127.0.0.1:1/0 -o learner.zero_stage=9", "learner.zero_stage"),
    ("quickstart --task sums", "no task 'sums'; there are arithmetic, agent, code, corrector, dialogue"),
    ("prepare --task sums", "no task 'sums'"),
    ("status", "name the run"),
    ("status a -c b", "name the run"),
    ("status .", "is not a run folder: it has no config.yaml"),
    ("dead -c CONFIG.yaml -o broker.url=http://x", "must start with redis://"),
    ("correction show icepopp", "preset 'icepopp' is unknown; did you mean icepop"),
    ("data check GSM-8K", "did you mean gsm8k?"),
    ("init odd.jsonl", "it has frage, antwort: rename one"),
    ("init none.jsonl", "none.jsonl"),
    ("init list.json", "use *.jsonl, *.parquet"),
    ("init odd.jsonl --output plain.yaml", "exists already"),
    ("agent try plain.yaml", "episode.agent is not set"),
    ("agent try agent.yaml --row 5", "--row 5: data.train has 5 prompts with an agent, which"),
    ("report none", "does not exist"),
    ("report nothing", "is not a run folder"),
    ("report .", "holds 3 runs: name one of them"),
    ("report one -o train.jsonl/page.html", "cannot be written"),
    ("compare one one", "alone cannot be compared"),
    ("compare one three", "does not exist"),
    ("compare one two --group-by learner.lrr", "did you mean learner.lr?"),
    ("compare one two -o one/config.yaml/page.html", "cannot be written"),
    ("dashboard runs/quikstart-1", "did you mean runs/quickstart-1?"),
    ("dashboard one --host 203.0.113.7 --port 0", "--host 203.0.113.7"),
    ("dashboard one --token ''", "--token is empty"),
    ("dashboard one --token x --no-token", "choose one of them"),
    ("dashboard one --host 0.0.0.0 --port 0 --no-token", "it is only for loopback"),
    ("episodes one --reward low", "reward 'low' is not a comparison; write for example '<0.5'"),
    ("episodes one --reward '<'", "reward '<' is not a comparison"),
    ("episodes one --step new", "step 'new' is neither a version nor a range"),
    ("episodes one --sort colour", "sort 'colour' is unknown; allowed: step, reward, turns"),
    ("episodes one --show t99", "no episode 't99' in "),
    ("episodes one --show e0-a-0", "give one of 0/e0-a-0, 10/e0-a-0"),
    ("episodes one --tokens", "--tokens shows one episode: give --show ID too"),
    ("episodes none", "is not a run folder"),
    ("episodes nothing", "holds no episodes: neither rollouts/"),
    ("trace one", "one"),
    ("trace missing", "missing"),
    *((f"{command} {LONG}", f"{LONG} cannot be used: File name too long") for command in ("trace", "episodes")),
    (f"report {LONG}", f"{LONG} cannot be read: File name too long"),
    (f"data check {LONG}.jsonl", f"{LONG}.jsonl cannot be read: File name too long"),
    (f"init one --output {LONG}", f"{LONG} cannot be used: File name too long"),
    ("values split gone.jsonl --parts 2 --output v", "data file gone.jsonl does not exist"),
    ("values split train.jsonl --parts 6 --output v", "has 5 rows, but --parts is 6: some subsets would be empty"),
    ("values split empty.jsonl --parts 1 --output v", "no rows in empty.jsonl: it is empty"),
    ("values split train.jsonl --parts 2 --output good.jsonl", "good.jsonl cannot be written"),
    ("values merge none*.jsonl --output v.json", "'none*.jsonl' matches no file"),
    ("values merge good.jsonl --output good.jsonl", "is one of the files that are read"),
    ("values merge empty.jsonl --output v.json", "no scores in 1 files"),
    ("values merge [gm]*.jsonl --output v.json", "minus.jsonl line 2: the score -1 is outside the reward range [0, 1]"),
    ("values merge good.jsonl --output v.json --threshold 0.5", "no effect without --binarize"),
    ("values merge good.jsonl --output v.json --reward-range 1 0", "--reward-range 1 0 is empty"),
    ("values merge good.jsonl --output v.json --reward-range 0 inf", "--reward-range 0 inf must be two finite numbers"),
    ("values merge good.jsonl --output v.json --binarize --threshold nan", "--threshold nan must be a finite number"),
    ("data demonstrations good.jsonl --output good.jsonl", "--output good.jsonl is one of the files that are read"),
    ("values estimate CONFIG.yaml --output v.json", "--output v.json must be a file *.jsonl"),
    ("values estimate gone.yaml --output v.jsonl", "cannot read configuration gone.yaml"),
    ("values estimate CONFIG.yaml --data gone.jsonl --output v.jsonl", "gone.jsonl"),
    ("values estimate CONFIG.yaml --data empty.jsonl --output v.jsonl", "no prompts in empty.jsonl"),
    ("values estimate CONFIG.yaml --data x=good.jsonl --output v.jsonl", "data.train has train; name the one"),
    ("values estimate CONFIG.yaml --data train.jsonl --output good.jsonl", "good.jsonl line 1 is not an answer"),
    ("values states CONFIG.yaml --output v.json", "--output v.json must be a file *.npz"),
    ("values states CONFIG.yaml --output v.npz -o data.train=gone.jsonl", "data file gone.jsonl does not exist"),
    ("values states CONFIG.yaml --output v.npz -o data.train=train.jsonl -o model.path=nothing", "nothing"),
    ("eval ./gone -c CONFIG.yaml", "there is no such folder"),
    ("eval nothing -c CONFIG.yaml", "neither a model folder (config.json) nor a checkpoint with an export"),
    ("eval Qwen/x -c CONFIG.yaml -o data.heldout=null", "there are no held-out prompts: give --data"),
    ("eval Qwen/x -c CONFIG.yaml --data gone.jsonl", "data file gone.jsonl does not exist"),
    ("eval Qwen/x -c CONFIG.yaml --data train.jsonl --data train.jsonl", "names 'train' twice"),
    ("eval Qwen/x -c CONFIG.yaml --output x.txt", "--output x.txt must be a file *.jsonl"),
    ("eval Qwen/x -c CONFIG.yaml --output list.json/x.jsonl", "list.json/x.run, cannot be made: Not a directory"),
    ("eval Qwen/x -c CONFIG.yaml --data a/lang=en/x.jsonl", "a/lang=en/x.jsonl does not exist"),
    ("eval Qwen/x -c CONFIG.yaml --data =x.jsonl", "=x.jsonl does not exist"),
]


@pytest.mark.parametrize(("command", "words"), REFUSALS, ids=str)
def test_what_cannot_be_is_one_line_and_leaves_nothing(
    command: str, words: str, made: Path, spo: Spo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    before = sorted(made.rglob("*"))
    command, words = (text.replace("CONFIG", "ROOT/configs/arithmetic") for text in (command, words))
    ran = spo(*shlex.split(command.replace("ROOT", str(ROOT))))
    (line,) = [line for line in ran.stderr.splitlines() if not re.match(r"[\d:]+ \[(info|warning) ", line)]
    assert (ran.returncode, line[:7], words.replace("ROOT", str(ROOT)) in line) == (2, "error: ", True), line
    assert ran.stdout == "" or command.startswith(("compare", "data check"))
    assert sorted(made.rglob("*")) == before
