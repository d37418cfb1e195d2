"""Configurations: where values come from, what they imply, what a run writes and shares, and the plugins they name."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import structlog
import yaml

from common.config import AlgorithmConfig, Config, differences, dump_config, load_config, parse_config, shared_values
from common.config.load import ConfigLoader
from common.config.redis_url import SentinelUrl
from common.config.shared import CHANGEABLE
from common.errors import UserError, reports_user_errors
from common.plugins import load_object, make_object
from launcher.layout.layout import NOTHING_ASKED, Choice, lay_out
from launcher.run.display import PlainView
from launcher.run.local_run import RunOptions, run_here
from launcher.run.progress import PhaseTimer
from tests.support.checks import config_of
from tests.support.plugin_package import ENTRY_POINTS, install

FILE = "model: {path: model}\ndata: {train: train.jsonl}\n"


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


def read(text: str, *overrides: str, **environ: str) -> Config:
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load_config("run.yaml", overrides, environ)


def test_command_line_beats_environment_beats_file() -> None:
    text = FILE + "learner: {lr: 1.0e-6, grad_clip: 2.0}\nrun: {steps: 5}\n"
    made = read(text, "learner.lr=3e-6", SPO__LEARNER__LR="2e-6", SPO__RUN__STEPS="7")
    assert (made.learner.lr, made.learner.grad_clip, made.run.steps) == (3e-6, 2.0, 7)


def test_yaml_reads_bands_as_text_and_numbers_as_numbers() -> None:
    for text in ("0.5_2", "0.5_2.0", "1_2", "0.999_1.001", "08", "019", "1:30", "2026-11-30", "2026-02-30"):
        assert yaml.load(text, ConfigLoader) == text
    numbers = {"1_000_000": 1_000_000, "12_000": 12_000, "-3": -3, "0": 0, "0x1f": 31, "true": True, "~": None}
    fractions = {"0.5": 0.5, ".5": 0.5, "1e-6": 1e-6, "1.0e-6": 1e-6, ".inf": float("inf")}
    for text, value in (numbers | fractions).items():
        parsed = yaml.load(text, ConfigLoader)
        assert (parsed, type(parsed)) == (value, type(value))


def test_off_is_a_word_though_yaml_reads_it_as_false() -> None:
    for key in ("deltas", "shared_folder"):
        assert getattr(read(f"{FILE}learner: {{weights: {{{key}: off}}}}\n").learner.weights, key) == "off"
        assert getattr(read(FILE, f"learner.weights.{key}=off").learner.weights, key) == "off"


def test_a_user_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        raise UserError("several\nlines")

    with pytest.raises(SystemExit) as caught:
        reports_user_errors(app)()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: several lines\n"


def test_a_tracker_that_only_keeps_count_selects_nothing() -> None:
    for method in ("grpo", "rloo", "none"):
        made = config_of(algorithm={"method": method})
        assert (made.sampler.drift.mode, made.sampler.selection.criterion) == ("constant", "uniform")
        chosen = {"drift": {"mode": "ledger"}, "selection": {"criterion": "std"}}
        sampler = config_of(algorithm={"method": method}, sampler=chosen).sampler
        assert (sampler.drift.mode, sampler.selection.criterion) == ("ledger", "std")
    assert config_of(algorithm=AlgorithmConfig()).sampler.drift.mode == "rescore"
    assert config_of(algorithm={"method": "none"}, sampler={"batch_size": 20}).algorithm.responses == 1


def test_a_deterministic_run_is_serial_and_has_one_generator(tmp_path: Path) -> None:
    plain = config_of()
    assert (plain.sampler.max_staleness, plain.generator.max_concurrency) == (4, "auto")
    made = config_of(run={"deterministic": True, "output_dir": "out"}, algorithm={"method": "grpo"})
    assert (made.sampler.max_staleness, made.generator.max_concurrency) == (0, 1)
    again = read(dump_config(made))
    assert (again.run.deterministic, again.sampler, again.generator) == (True, made.sampler, made.generator)
    assert lay_out(made, NOTHING_ASKED).generators == ((),)
    log = structlog.get_logger()
    with pytest.raises(UserError, match="3 generators were asked for; start one"):
        run_here(made, RunOptions(Choice(3)), lambda: PlainView(log), log, PhaseTimer())
    assert not (tmp_path / "out").exists(), "nothing has begun"


def test_an_agent_is_a_name_or_a_section() -> None:
    named = config_of(episode={"agent": "a:b"})
    assert parse_config(yaml.safe_load(dump_config(named))) == named
    agent = named.episode.agent
    assert agent is not None
    assert (agent.function, agent.command, agent.failure, agent.shown) == ("a:b", None, "retry", "a:b")
    assert named.episode.assistant_turns is None
    sources = [{"path": "x", "episode": {"agent": None}}, {"path": "y", "episode": {"agent": {"command": ["b", "-c"]}}}]
    mixed = config_of(data={"train": sources}, episode={"agent": "a:b"})
    without, other = mixed.episodes_in_use().values()
    assert (without.agent, without.assistant_turns) == (None, 1)
    assert (other.agent is not None and other.agent.shown, other.assistant_turns) == ("b -c", None)


def test_processes_may_differ_in_what_is_local_and_nothing_else() -> None:
    theirs = json.loads(json.dumps(config_of().model_dump(mode="json")))
    ours = config_of(broker={"url": "redis://elsewhere"}, generator={"max_concurrency": 3}, learner={"lr": 1})
    assert [str(one) for one in differences(ours, theirs)] == ["learner.lr (here 1.0, in the run 1e-06)"]
    shared = shared_values(ours)
    assert "dead_after" in shared["broker"]
    assert not {"url", "password_file", "wait"} & set(shared["broker"])


def test_an_adapter_stays_as_the_run_began() -> None:
    without, with_8, with_16 = config_of(), *(config_of(learner={"lora": {"rank": n}}) for n in (8, 16))
    for one, other in ((without, with_8), (with_8, without), (with_8, with_16)):
        keys = [difference.key for difference in differences(one, shared_values(other))]
        assert keys
        assert not CHANGEABLE & set(keys)


def test_what_a_run_writes_has_absolute_paths_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "a.jsonl").touch()
    a = {"path": "a.jsonl", "teacher": {"model": "model"}}
    sources = [a, {"path": "gsm8k"}, {"path": "reasoning_gym:chain_sum"}]
    named = {"model": {"path": "model"}, "teacher": {"model": "model"}}
    made = config_of(data={"train": sources}, sampler={"initial_values": "values.json"}, **named)
    values = yaml.safe_load(dump_config(made, absolute=True))
    assert values["model"]["path"] == str(tmp_path / "model")
    assert values["teacher"]["model"] == values["data"]["train"][0]["teacher"]["model"] == str(tmp_path / "model")
    assert values["run"]["output_dir"] == str(tmp_path / "runs")
    assert values["sampler"]["initial_values"] == str(tmp_path / "values.json")
    paths = [source["path"] for source in values["data"]["train"]]
    assert paths == [str(tmp_path / "a.jsonl"), "gsm8k", "reasoning_gym:chain_sum"]
    assert parse_config(values).data.sources("train")[0].name == "a"
    (tmp_path / "part-0.jsonl").touch()
    several = yaml.safe_load(dump_config(config_of(data={"train": ["part-*.jsonl", "gone.jsonl"]}), absolute=True))
    assert several["data"]["train"] == [f"{tmp_path}/part-*.jsonl", "gone.jsonl"]
    hub = yaml.safe_load(dump_config(config_of(model={"path": "Qwen/Qwen3-8B"}), absolute=True))
    assert hub["model"]["path"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(("here", "agree"), [("model", True), ("runs/model", False), ("/data/model", False)])
def test_a_relative_path_agrees_with_an_absolute_one(here: str, agree: bool) -> None:
    there = "/home/me/model"

    def named(path: str) -> list[Config]:
        sections: list[dict[str, Any]] = [
            {"model": {"path": path}},
            {"data": {"train": [{"path": path, "weight": 2}]}},
            {"data": {"train": ["a.jsonl", path]}},
            {"teacher": {"model": path}},
            {"data": {"train": [{"path": "a", "teacher": {"model": path}}]}},
        ]
        return [config_of(**section) for section in sections]

    for ours, theirs in zip(named(here), named(there), strict=True):
        assert bool(differences(ours, shared_values(theirs))) != agree
    assert differences(named(here)[1], shared_values(config_of(data={"train": [{"path": there, "weight": 3}]})))


def test_a_module_beside_the_file_or_in_a_named_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside_the_file.py").write_text("def score(text): return 1.0")
    (tmp_path / "common.py").write_text("def score(text): return 1.0")
    assert read(FILE).run.modules == str(tmp_path)
    assert load_object("beside_the_file:score", {}, "episode.reward")("") == 1.0
    with pytest.raises(UserError, match=r"module common has no score; .*common.py is hidden by .*: give it another"):
        load_object("common:score", {}, "episode.reward")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "in_a_folder.py").write_text("def score(text): return 0.5")
    read(FILE + "run: {modules: mine}")
    assert load_object("in_a_folder:score", {}, "episode.reward")("") == 0.5


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        (
            "redis+sentinel://a:26379,b:26380,10.0.0.3:1/spo/2",
            SentinelUrl((("a", 26379), ("b", 26380), ("10.0.0.3", 1)), "spo", 2),
        ),
        (
            "rediss+sentinel://a:1/spo/0?ssl_ca_certs=/etc/ca.crt&ssl_check_hostname=false",
            SentinelUrl((("a", 1),), "spo", tls={"ssl_ca_certs": "/etc/ca.crt", "ssl_check_hostname": False}),
        ),
        ("redis+sentinel://asks:it@a:1,b:2/spo/1", SentinelUrl((("a", 1), ("b", 2)), "spo", 1, "asks", "it")),
    ],
)
def test_an_address_names_sentinels_service_database_and_login(url: str, parsed: SentinelUrl) -> None:
    assert SentinelUrl.parse(url) == parsed
    assert config_of(broker={"url": url}).broker.url == url


def load(name: str) -> Any:
    return load_object(name, {"ours": 1}, "episode.tools", "spo.tools")


def test_a_name_is_ours_a_module_s_object_or_a_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", monkeypatch)
    import measuring

    assert load("pathlib:Path") is Path
    assert load("ruler") is measuring.Ruler
    assert load_object("brevity", {}, "episode.reward", "spo.rewards") is measuring.brevity
    with pytest.raises(UserError) as caught:
        load("rule")
    assert str(caught.value) == (
        "episode.tools = 'rule' is unknown; allowed: ours, ruler, or module:object of your own, in a module beside the "
        "configuration or installed"
    )
    install(tmp_path / "greedy", monkeypatch, {"spo.tools": {"ours": "measuring:Ruler"}}, "greedy")
    assert load("ours") == 1


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", monkeypatch)
    install(tmp_path / "same", monkeypatch, ENTRY_POINTS, "again")
    assert load("ruler").name == "ruler"
    install(tmp_path / "two", monkeypatch, {"spo.tools": {"ruler": "measuring:Nodding"}}, "other")
    with pytest.raises(UserError, match=r"give one of \['measuring:Nodding', 'measuring:Ruler'\]"):
        load("ruler")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere_at_all:x", "cannot import nowhere_at_all .*; allowed: ours, or module:object"),
        ("pathlib:nothing", "module pathlib has no nothing; allowed: ours"),
        ("broken.py:x", "this is a file; write the module, broken:x"),
        ("broken:x", r"cannot import broken \(ZeroDivisionError: division by zero\)"),
        ("a_script:x", r"cannot import a_script \(SystemExit: 0\); fix it in line 2 of .*a_script.py"),
    ],
)
def test_a_failed_import_is_one_line(name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"episode.tools = '{name}': {reason}"):
        load(name)


class Unknown(Protocol): ...


class Kind:
    def __init__(
        self,
        helper: Unknown,
        number: int,
        share: float = 0.5,
        names: Sequence[str] = (),
        place: Path | None = None,
        side: Literal["left", "right"] = "left",
        **others: Any,
    ) -> None:
        self.values = [helper, number, share, names, place, side, others]
        if share > 1:
            raise ValueError("share is above 1")
        if number == 13:
            raise LookupError("no such luck")


def make(**options: Any) -> Any:
    return make_object(Kind, {"number": 1} | options, "options of 'x'", {"helper": "him"})


def test_options_become_what_the_constructor_names() -> None:
    made = make(number="3", share=1, names=["a"], place="/x", side="right", more=[1])
    assert made.values == ["him", 3, 1.0, ["a"], Path("/x"), "right", {"more": [1]}]
    assert make(place=None).values[4] is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"number": "three"}, "number = 'three': input should be a valid integer"),
        ({"side": "up"}, "side = 'up': input should be 'left' or 'right'"),
        ({"share": 2.0}, "share is above 1"),
        ({"helper": "her"}, "'helper' is not an option"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_its_value(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"^options of 'x': .*{reason}"):
        make(**options)
