"""A generator and a learner that do no work, to drive a sampler in tests."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config, parse_config
from common.messages import Batch, SampleHeader, Step, Task
from common.payload import Payload, pack_record
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.tasks import Delivery, Finished, TaskInbox
from sampler.prompts.prompt_set import PromptSet
from sampler.tracker import ValueTracker
from sampler.values.drift import PromptDrift
from tests.support.streams import payload


def make_config(folder: Path, *, prompts: int = 40, heldout: int = 0, **sections: dict[str, Any]) -> Config:
    """A run of few, small batches, without trackers; sections are merged over the defaults given here."""
    write_prompts(folder / "train.jsonl", "train", prompts)
    write_prompts(folder / "heldout.jsonl", "heldout", heldout)
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "steps": 6, "output_dir": str(folder), "log_to": []},
        "model": {"path": "none"},
        "data": {"train": str(folder / "train.jsonl")},
        "sampler": {"batch_size": 8, "max_staleness": 1, "drift": {"mode": "ledger"}},
        "eval": {"every": 2},
        "broker": {"dead_after": 30},
    }
    if heldout:
        tree["data"]["heldout"] = str(folder / "heldout.jsonl")
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


def write_prompts(path: Path, name: str, n: int) -> None:
    write_rows(path, *({"prompt": f"{name} {i}", "answer": i} for i in range(n)))


def write_rows(path: Path, *rows: Any) -> Path:
    """Write JSON lines; a text is a line as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sent(prompts: PromptSet) -> list[Task]:
    """Each prompt's task, as a generator reads it."""
    tasks = []
    for i, prompt_id in enumerate(prompts.ids):
        prompt = prompts[i]
        task = Task(task_id="t", prompt_id=prompt_id, prompt=prompt.prompt, answer=prompt.answer, row=prompt.row)
        tasks.append(Task.unpack(task.pack()))
    return tasks


def reward_of(task: Task) -> float:
    return float(blake2b(task.task_id.encode(), digest_size=1).digest()[0] % 2)


class NoopGenerator:
    """Answers tasks at once, by the newest version it knows or the one kept for an evaluation; scored, if `taught`."""

    def __init__(self, broker: Broker, name: str = "noop", taught: bool = False) -> None:
        self.inbox, self.taught = TaskInbox(broker, name), taught
        self.version = 0
        self.loaded = 0
        self.headers: list[SampleHeader] = []  # in the order of arrival
        self.tasks: list[Task] = []

    def work(self, n: int = 64, block_ms: int = 0, **changes: Any) -> int:
        if not self.inbox.lease(self.loaded, 0, 0).evaluation:
            self.loaded = self.version
        lease = self.inbox.lease(self.loaded, n, n)
        deliveries = lease.deliveries or self.inbox.adopt(n, lease.evaluation) or self.inbox.adopt(n)
        deliveries = deliveries or self.inbox.take(n, block_ms)
        self.finish(deliveries, **changes)
        return len(deliveries)

    def finish(self, deliveries: list[Delivery], **changes: Any) -> int:
        """Answer these; returns how many of the answers were accepted."""
        results = []
        for delivery in deliveries:
            task = delivery.task
            version = self.loaded if task.evaluation else max(self.loaded, task.min_version)
            said = str(task.answer) if reward_of(task) else "a"
            values: dict[str, Any] = {"task_id": task.task_id, "prompt_id": task.prompt_id, "kind": task.kind}
            values |= {"reason": "stop", "reward": reward_of(task), "reward_parts": {"exact": reward_of(task)}}
            values |= {"tokens": 10, "model_tokens": 6, "turns": 1}
            values |= {"oldest_version": version, "newest_version": version}
            if task.kind != "train":
                values["answer"] = said
            if task.kind != "train" or task.keep:
                messages = [{"role": "assistant", "content": said}]
                record = {"input": task.prompt, "output": said, "gts": task.answer, "messages": messages}
                tokens_of = vars_of(payload(version=version)) if task.keep else {}
                values["record"] = pack_record(record | tokens_of)
            header = SampleHeader(**(values | changes))
            self.headers.append(header)
            self.tasks.append(task)
            tokens = payload(version=version)
            if self.taught:
                scores = np.full((len(tokens.logprobs), 1), -0.5, np.float32)
                tokens = dataclasses.replace(tokens, teacher_logprobs=scores)
            results.append(Finished(delivery.entry_id, header, tokens if task.kind == "train" else None))
        return self.inbox.finish(results)


def vars_of(tokens: Payload) -> dict[str, Any]:
    return {
        "token_ids": tokens.token_ids,
        "model_spans": tokens.model_spans,
        "logprobs": tokens.logprobs.astype(np.float64).round(5),
        "version_spans": tokens.version_spans,
    }


class NoopLearner:
    """Takes one batch after another and announces the next version; `folder` is the run's, for training data."""

    def __init__(self, broker: Broker, version: int = 0, folder: Path | None = None) -> None:
        self.inbox = BatchInbox(broker).acquire(0)
        self.folder = folder
        self.version = version
        self.batches: list[Batch] = []
        self.inbox.announce(Step(version=version))

    def work(self, block_ms: int = 0, *, checkpoint: bool = False) -> bool:
        batch = self.inbox.next(block_ms)
        if batch is None:
            return False
        assert batch.batch_id == self.version
        payloads = [one for one in self.inbox.payloads(batch.sample_ids) if one is not None]
        assert len(payloads) == len(batch.sample_ids), "every sample of a batch has its tokens"
        self.batches.append(batch)
        metrics = self.record(batch, payloads)
        self.version += 1
        mean = sum(batch.rewards) / len(batch.rewards)
        metrics |= {"reward/mean": mean, "batch/samples": float(len(batch.rewards)), "batch/left_out": 0.0}
        if taught := sum(len(one.teacher_logprobs) > 0 for one in payloads):
            metrics["teacher/tokens"] = taught / len(payloads)
        drift = 0.002 * self.version
        self.inbox.announce(Step(version=self.version, drift=drift, metrics=metrics, checkpoint=checkpoint))
        self.inbox.release_before(self.version)
        return True

    def record(self, batch: Batch, payloads: list[Payload]) -> dict[str, float]:
        """Write training data of the samples that are kept; the metrics of a critic with values 0, 0.01, 0.02, ..."""
        tokens = [len(payload.logprobs) for payload in payloads]
        values, judged = [np.arange(n) / 100 for n in tokens], batch.returns is not None
        returns = [np.full(n, one[0]) for n, one in zip(tokens, batch.returns or [[0.0]] * len(tokens), strict=True)]
        raw = [one - value for one, value in zip(returns, values, strict=True)]
        mean, deviation = np.concatenate(raw).mean(), np.concatenate(raw).std(ddof=1)
        lines = []
        for i, (name, tokens_of) in enumerate(zip(batch.sample_ids, payloads, strict=True)):
            line = {
                "task_id": name,
                "row": 0,
                "mini_batch": 0,
                "advantages": [round(batch.advantages[i], 5)],
                "token_ids": tokens_of.token_ids[tokens_of.mask()].tolist(),
                "token_versions": tokens_of.versions().tolist(),
                "rollout_logprobs": tokens_of.logprobs.astype(float).round(5).tolist(),
                "logprobs": (tokens_of.logprobs.astype(float) - 0.001).round(5).tolist(),
            }
            if len(tokens_of.teacher_logprobs):
                line["teacher_logprobs"] = tokens_of.teacher_logprobs[:, 0].tolist()
            if judged:
                advantages = ((raw[i] - mean) / deviation).round(5)
                columns = {"values": values[i], "returns": returns[i], "token_advantages": advantages}
                line |= {column: numbers.tolist() for column, numbers in columns.items()}
            if batch.kept is not None and batch.kept[i]:
                lines.append(line)
        if self.folder is not None and batch.kept is not None:
            path = self.folder / "training_data" / f"{batch.batch_id}.0.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        figures = {"lr": 1e-5, "loss": 0.25, "grad_norm": 1.0, "value_mean": float(np.concatenate(values).mean())}
        return {f"critic/{name}": figure for name, figure in figures.items()} if judged else {}


def replayed(config: Config, ids: list[str], headers: list[SampleHeader], versions: int) -> dict[str, Any]:
    """The counts of every answered prompt if an undisturbed sampler counts all headers at once."""
    tracker, drift = ValueTracker(ids, config.sampler.tracker), PromptDrift(config.sampler.drift, len(ids))
    for version in range(versions + 1):
        drift.record(version, 0.002 * version)
    for header in headers:
        if header.kind == "train" and header.status == "ok":
            i = tracker.index[header.prompt_id]
            tracker.update(header.prompt_id, header.reward, drift.measure(i, header.drift, header.newest_version))
    return {prompt_id: tracker.counts(prompt_id) for i, prompt_id in enumerate(ids) if drift.answered[i] >= 0}


def flip_in_directory(path: Path, field: int, bits: int) -> None:
    """Damage an archive: flip bits of a field of its first entry, counted from the start of the entry."""
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + field] ^= bits
    path.write_bytes(data)
