"""The `spo` command: what it prints, and that what cannot work is one line and exit code 2."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from pathlib import Path

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
from common.config import load_config
from launcher import chaos
from launcher.checks import command as checks
from launcher.cli import GROUPS
from launcher.config_reference import reference
from launcher.quickstart import command, inputs
from launcher.tasks import TASKS
from launcher.tasks.task import QuickstartTask
from tests.support.checks import small_model
from tests.support.spo_command import Spo

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "arithmetic.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_committed_reference_of_the_configuration_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference()


def test_config_prints_every_key_with_overrides_applied(spo: Spo) -> None:
    ran = spo("config", CONFIG, "-o", "run.steps=7")
    assert ran.returncode == 0
    printed = yaml.safe_load(ran.stdout)
    assert printed["run"]["steps"] == 7
    assert printed["broker"]["dead_after"] > 0


# Others are on docs/troubleshooting.md, whose test gives them.
REFUSALS = [
    (
        ["run", CONFIG, "-o", "run.steps=2", "learner.lr=1", "episode.tools=[a, b]"],
        "set by -o learner.lr=1 -o 'episode.t",
    ),
    (["config", CONFIG, "run.steps=2"], "a key of the configuration is set by -o run.steps=2"),
    (["data", "check", CONFIG, "run.steps=2"], "a key of the configuration is set by -o run.steps=2"),
    (["doctor", "-c", CONFIG, "-o", "run.steps", "2"], "a key of the configuration is set by -o run.steps=2"),
    (["doctor", CONFIG], f"the configuration is given by -c {CONFIG}"),
    (["run", CONFIG, "other.yaml"], "run --help"),
    (["run", CONFIG.with_suffix(".yml")], f"No such file or directory; did you mean {CONFIG}?"),
    (["config", CONFIG.with_suffix("")], f"did you mean {CONFIG}?"),
    (["config", CONFIG.parent / "arithmatic.yaml"], f"did you mean {CONFIG}?"),
    (["config", CONFIG.parent / "environment"], "Is a directory; did you mean"),
    (["config", CONFIG.parent.parent / "tests"], "Is a directory; give a YAML file, not a folder"),
    (
        ["config", CONFIG, "-o", "algorithm.loss=ppo_clp"],
        "algorithm.loss = 'ppo_clp' is unknown; did you mean ppo_clip?",
    ),
    (["quickstart", "-o", "learner.zero_stage=9"], "learner.zero_stage"),
    (["quickstart", "--redis", "redis://127.0.0.1:1/0", "-o", "learner.zero_stage=9"], "learner.zero_stage"),
    (["quickstart", "--task", "sums"], "no task 'sums'; there are arithmetic, agent, code, corrector, dialogue"),
    (["prepare", "--task", "sums"], "no task 'sums'"),
    (["status"], "name the run"),
    (["status", "a", "-c", "b"], "name the run"),
    (["status", "."], "is not a run folder: it has no config.yaml"),
    (["dead", "-c", CONFIG, "-o", "broker.url=http://x"], "must start with redis://"),
    (["correction", "show", "icepopp"], "preset 'icepopp' is unknown; did you mean icepop"),
    (["data", "check", "GSM-8K"], "did you mean gsm8k?"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSALS, ids=str)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    arguments: list[object], words: str, folder: Path, spo: Spo
) -> None:
    ran = spo(*arguments)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert ran.stderr.startswith("error: ")
    assert words in ran.stderr
    assert list(folder.iterdir()) == []


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
    monkeypatch.setattr(checks, "_dry_run_checks", list)
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


def test_chaos_needs_a_checkout(spo: Spo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "CHECKOUT", folder)
    ran = spo("chaos", "--minutes", "1")
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "needs a source checkout" in ran.stderr


def test_what_is_prepared_can_be_run_as_the_help_says(folder: Path, spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def cached_model(task: QuickstartTask, *_: object) -> Path:
        made.append((task.name, task.recipe.experts))
        return small_model(folder / f"cached {len(made)}", (2, 2))

    monkeypatch.setattr(command, "cached_model", cached_model)
    assert spo("prepare", "mixture", "--task", "code", "--experts", "4").returncode == 0
    assert spo("prepare", "small").returncode == 0
    assert made == [("code", 4), ("arithmetic", 0)]
    config = load_config(folder / "small" / "run.yaml", (), {})
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
