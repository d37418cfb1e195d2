"""One configuration a run: which keys may change, and when."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.config import Config, parse_config
from common.config.shared import CHANGEABLE
from common.errors import UserError
from common.files import METADATA, checkpoint
from common.messages import Step
from common.process import Role
from common.streams.agreement import agree, agree_on_download, changes_of, compare
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.presence import Presence
from tests.support.checks import small_model
from tests.support.whole_run import merged

BASE = {"model": {"path": "m"}, "data": {"train": "t"}, "run": {"steps": 10}, "broker": {"dead_after": 0.5}}


def config(**sections: dict[str, Any]) -> Config:
    return parse_config(merged(BASE, sections))


OTHER_DATA, MORE_EVALUATIONS = {"train": "others"}, {"every": 3}


def train_to(broker: Broker, version: int) -> None:
    BatchInbox(broker).acquire().announce(Step(version=version))


def test_before_the_first_step_any_key_may_change(real_broker: Broker) -> None:
    redis, key, log = real_broker.redis, real_broker.key, structlog.get_logger()
    neighbour = Broker(redis, real_broker.run + "-2")
    agree(neighbour, config())
    agree(real_broker, config(), log)
    agree(real_broker, config(broker={"url": "redis://elsewhere"}), may_differ=False)  # which is local to a machine
    train_to(real_broker, 0)
    redis.set(key("payload:t1"), b"of the other reward")
    changed = config(data=OTHER_DATA, episode={"reward": "math"}, learner={"lr": 0.5})
    with structlog.testing.capture_logs() as lines:
        agree(real_broker, changed, log)
    kept = {name.decode() for name in redis.scan_iter(key("*"))}
    assert kept - {key("reconfigured")} == {key("config"), key("release")}
    agree(real_broker, changed)
    (line,) = lines
    assert "from the beginning" in line["event"]
    assert "learner.lr: 1e-06 -> 0.5" in line["changes"]
    agree(neighbour, config(), may_differ=False)


def test_a_run_that_redis_forgot_does_not_begin_again(real_broker: Broker, tmp_path: Path) -> None:
    folder = {"output_dir": str(tmp_path), "experiment": "lost"}
    agree(real_broker, config(run=folder))
    metadata = checkpoint(tmp_path / "lost", 7) / METADATA
    metadata.parent.mkdir(parents=True)
    metadata.touch()
    with pytest.raises(UserError, match="data.train .* cannot change after step 7"):
        agree(real_broker, config(run=folder, data=OTHER_DATA))


def test_after_the_first_step_some_keys_may_change(real_broker: Broker) -> None:
    agree(real_broker, config())
    train_to(real_broker, 4)
    now = {"learner": {"lr": 0.5}, "eval": MORE_EVALUATIONS}
    with pytest.raises(UserError, match="use that, or choose another run.name"):
        agree(real_broker, config(**now), may_differ=False)
    agree(real_broker, config(**now), structlog.get_logger())
    assert [(change["step"], change["key"], change["from"], change["to"]) for change in changes_of(real_broker)] == [
        (4, "learner.lr", 1e-6, 0.5),
        (4, "eval.every", 10, 3),
    ]
    with pytest.raises(UserError, match=r"sampler.batch_size \(here 64, in the run 128\), which cannot change after"):
        agree(real_broker, config(sampler={"batch_size": 64}, **now))
    with pytest.raises(UserError, match="spo fork RUN NEW -o sampler.batch_size=..."):
        compare(real_broker, config(sampler={"batch_size": 64}))


def test_a_finished_run_goes_on_where_it_gets_more_steps(real_broker: Broker) -> None:
    agree(real_broker, config())
    train_to(real_broker, 10)
    real_broker.finish()
    agree(real_broker, config(eval=MORE_EVALUATIONS))
    assert real_broker.finished()
    agree(real_broker, config(eval=MORE_EVALUATIONS, run={"steps": 12}))
    assert not real_broker.finished()
    with pytest.raises(UserError, match="at step 10, with tasks for steps up to 12: run.steps = 11 is too low"):
        agree(real_broker, config(eval=MORE_EVALUATIONS, run={"steps": 11}))
    agree(real_broker, config(eval=MORE_EVALUATIONS, run={"steps": 100}))
    # max_staleness is 4.
    with pytest.raises(UserError, match="with tasks for steps up to 15: run.steps = 14 is too low; use 15 or more"):
        agree(real_broker, config(eval=MORE_EVALUATIONS, run={"steps": 14}))
    agree(real_broker, config(eval=MORE_EVALUATIONS, run={"steps": 15}))


def test_nothing_changes_under_a_process_that_lives(real_broker: Broker) -> None:
    agree(real_broker, config())
    with (
        Presence(real_broker, "generator-7", "generator", interval=0.05),
        pytest.raises(UserError, match=r"stop all of the run's processes first \(generator-7\)"),
    ):
        agree(real_broker, config(eval=MORE_EVALUATIONS))
    # One that was killed is waited for.
    real_broker.dead_after = 0.5
    Presence(real_broker, "generator-7", "generator").beat()
    agree(real_broker, config(eval=MORE_EVALUATIONS))
    assert real_broker.processes() == {}


def test_of_two_that_come_with_different_changes_one_is_refused(real_broker: Broker) -> None:
    agree(real_broker, config())
    outcomes: list[str] = []

    def come(every: int) -> None:
        broker = Broker(real_broker.redis, real_broker.run)
        try:
            agree(broker, config(eval={"every": every}))
            with Presence(broker, f"learner-{every}", "learner", interval=0.05):
                both.wait()
            outcomes.append("agreed")
        except UserError as error:
            outcomes.append("refused" if f"learner-{5 - every}" in str(error) else str(error))
            both.wait()

    both = threading.Barrier(2)
    threads = [threading.Thread(target=come, args=[every]) for every in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["agreed", "refused"]


def test_a_run_that_has_just_begun_is_not_replaced(real_broker: Broker) -> None:
    """The first process has stored its configuration, and sends its first heartbeat once the other looks for one."""
    agree(real_broker, config(broker={"dead_after": 10.0}))
    with ExitStack() as stack:
        first = Presence(real_broker, "sampler", "sampler", interval=0.05)
        reads, looks = real_broker.processes, iter([lambda: stack.enter_context(first)])

        def processes() -> Any:
            seen = reads()
            next(looks, lambda: None)()
            return seen

        real_broker.processes = processes  # type: ignore[method-assign]
        with pytest.raises(UserError, match=r"stop all of the run's processes first \(sampler\)"):
            agree(real_broker, config(data=OTHER_DATA))


def test_a_generator_with_other_model_files_is_refused(real_broker: Broker, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", (2, 2))
    tokenizer, template = model / "tokenizer.json", model / "chat_template.jinja"
    joined = config(model={"path": str(model)})

    def refused(file: Path, words: str, role: Role = Role.GENERATOR) -> None:
        with pytest.raises(UserError, match=f"another model: {model}: {file.name} {words}; copy the folder"):
            agree(real_broker, joined, role=role)

    agree(real_broker, joined, role=Role.GENERATOR)
    tokenizer.write_text('{"version": "1.0"}')
    agree(real_broker, joined, structlog.get_logger(), role=Role.GENERATOR)  # the run starts from the beginning
    train_to(real_broker, 4)
    (model / "model.safetensors").write_bytes(b"weights that the learner's replace")
    agree(real_broker, joined, role=Role.GENERATOR)
    tokenizer.write_text("{}")
    refused(tokenizer, r"\(here '\w{16}', in the run '\w{16}'\)")
    tokenizer.unlink()
    agree(real_broker, joined, role=Role.LEARNER)  # which tokenizes nothing
    tokenizer.write_text('{"version": "1.0"}')
    template.write_text("{{ messages }}")
    for role in (Role.GENERATOR, Role.LEARNER):
        refused(template, r"\(here '\w{16}', in the run 'missing'\)", role)


def test_a_generator_with_another_cached_revision_is_refused(real_broker: Broker, tmp_path: Path, monkeypatch) -> None:
    def loads(machine: str, tokenizer: str, **run: Any) -> Config:
        """A machine's cache of the Hugging Face hub, after a process has loaded `org/model` there."""
        cached = tmp_path / machine / "models--org--model"
        folder = small_model(cached / "snapshots" / machine, (2, 2))
        (folder / "tokenizer.json").write_text(tokenizer)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(machine)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / machine))
        return config(model={"path": "org/model"}, run=run)

    def joins(joined: Config) -> None:
        agree(real_broker, joined, role=Role.GENERATOR)
        agree_on_download(real_broker, joined)

    joins(config(model={"path": "org/model"}))  # nothing is cached
    joins(loads("a", "{}"))
    joins(loads("b", "{}"))
    other = rf"another model: org/model: tokenizer.json \(.*; copy the folder {tmp_path}/c/models--org--model from"
    with pytest.raises(UserError, match=other):
        joins(loads("c", '{"version": "1.0"}'))
    joins(loads("d", "{}"))


def test_weights_on_disk_count_where_they_are_computed_with(real_broker: Broker, tmp_path: Path) -> None:
    model = small_model(tmp_path / "model", (2, 2))
    answers = config(model={"path": str(model)}, run={"steps": 0})
    agree(real_broker, answers, role=Role.GENERATOR)
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(UserError, match=f"another model: {model}: model.safetensors "):
        agree(real_broker, answers, role=Role.GENERATOR)


def test_a_process_of_another_release_is_refused(real_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    agree(real_broker, config())
    monkeypatch.setattr("common.streams.agreement.release", lambda: "99.0")
    with pytest.raises(UserError, match=r"was started with SPO .*, but this is 99.0; use the same release \(image\)"):
        agree(real_broker, config())


def test_every_name_of_the_list_is_a_key() -> None:
    def keys(values: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            name
            for key, value in values.items()
            for name in (keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"})
        }

    all_keys = keys(config().model_dump(by_alias=True))
    assert [pattern for pattern in CHANGEABLE if pattern.removesuffix(".*") not in all_keys | {"eval"}] == []
    assert "sampler.batch_size" not in CHANGEABLE
