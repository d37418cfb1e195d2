"""Every place that reads bytes from elsewhere: examples, the reader, and the exceptions by which it may refuse them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import structlog

from common.config import DataConfig
from common.messages import Batch, InvalidMessage, Message, SampleHeader, Step, Task
from common.network import RetryableError
from common.payload import Payload, decode_payload, encode_payload, open_record, pack_record
from common.unpack import Unreadable, unpack
from common.weights import wire
from generator.agents.containers.grading import reward_of
from generator.rewards import scoring_process as frames
from generator.rewards.pool import RewardFailed
from sampler.files.episode_files import episode_line
from sampler.prompts.prompt_set import check_rows, read_answer, read_prompt
from sampler.prompts.row import BadRow
from sampler.prompts.rows import open_rows
from sampler.scores import read_scores
from sandbox_client.client import _parse as parse_sandbox_answer
from tests.support.mutations import Mutations, from_json, from_msgpack, to_json, to_msgpack

MOST_MEMORY = 128 << 20  # bytes that reading one input may need, above the input itself

Accept = Callable[[bytes], object]


@dataclass(frozen=True)
class Boundary:
    """A place where bytes are read."""

    seeds: Sequence[bytes]  # valid inputs
    open: Callable[[Path], Accept]  # makes a function that reads one input, within a folder, and checks the result
    refusals: tuple[type[Exception], ...] = (InvalidMessage,)  # the only exceptions that it may raise
    read: Callable[[bytes], Any] = from_msgpack  # see `Mutations`
    write: Callable[[Any], bytes] = to_msgpack


class Broken(AssertionError):
    """A reader did not refuse an input as it should; the text says how to reproduce it."""


def check(name: str, inputs: int, seed: int = 0) -> Counter[str]:
    """Feed mutated inputs to a boundary: how many it `read` and `refused`, and `MiB`, the most memory one took."""
    boundary, outcomes, most = BOUNDARIES[name], Counter[str](), 0
    mutations = Mutations(boundary.seeds, seed, boundary.read, boundary.write)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        accept = boundary.open(Path(folder))
        for data in boundary.seeds:
            accept(data)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for number in range(inputs):
            data = next(mutations)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            again = f"input {number} of seed {seed}, {data[:200]!r}"
            try:
                accept(data)
                outcomes["read"] += 1
            except boundary.refusals as error:
                outcomes["refused"] += 1
                str(error).encode()  # it is sent and logged
            except Exception as error:
                raise Broken(f"{name}: {type(error).__name__}: {error!s:.300}; {again}") from error
            used = tracemalloc.get_traced_memory()[1] - before
            most = max(most, used)
            if used > MOST_MEMORY:
                raise Broken(f"{name}: {used >> 20} MiB; {again}")
    outcomes["MiB"] = most >> 20
    return outcomes


def payload(data: bytes) -> None:
    value = decode_payload(data)
    assert value.mask().sum() == len(value.logprobs) == len(value.versions())
    decode_payload(encode_payload(value))
    assert sum(len(decode_payload(encode_payload(row)).token_ids) for row in value.rows()) == len(value.token_ids)


def record(data: bytes) -> None:
    line = open_record(data)
    assert b"\n" not in line
    header = SampleHeader(task_id="e0-1", prompt_id="p", reward=0.5, record=data)
    row = json.loads(episode_line(header, {"version": 0}, {"input": "i"}))
    assert (row["task_id"], row["reward"], row["version"]) == ("e0-1", 0.5, 0)


def rows(folder: Path) -> Accept:
    """Reads lines as a data set; each row without a problem must make a valid task."""
    (source,) = DataConfig(train=str(folder / "rows.jsonl")).sources("train")

    def accept(data: bytes) -> None:
        Path(source.path).write_bytes(data)
        lines = open_rows(source.path, "train")
        for row in check_rows(lines, source):
            if row.problem is not None:
                str(row.problem).encode()
                continue
            fields = lines[row.number]
            task = Task(task_id="t", prompt_id=row.prompt_id, prompt=read_prompt(fields, source),
                        answer=read_answer(fields, source), row=fields)  # fmt: skip
            Task.unpack(task.pack())

    return accept


def scores(folder: Path) -> Accept:
    path = folder / "scores.jsonl"

    def accept(data: bytes) -> None:
        path.write_bytes(data)
        for row in read_scores(path):
            assert isinstance(row, BadRow) or all(map(math.isfinite, row.scores))

    return accept


def reads(accept: Accept) -> Callable[[Path], Accept]:
    return lambda folder: accept


def wired(read: Callable[[bytes], Message]) -> Callable[[Path], Accept]:
    return reads(lambda data: read(read(data).pack()))


def with_right_checksum(reply: Any) -> bytes:
    """Packs a manifest so that not only its checksum is wrong."""
    if isinstance(reply, dict) and "own_checksum" in reply:
        reply |= {"own_checksum": wire.checksum(to_msgpack(reply | {"own_checksum": 0}))}
    return to_msgpack(reply)


def unzipped(data: bytes) -> Any:
    return from_json(zlib.decompress(data))


def reward_result(data: bytes) -> None:
    ((kind, value),) = frames.unpack_result(data, 1).items()
    assert isinstance(value, str) or (kind == "value" and (value is None or math.isfinite(value)))


def packed(*values: Message) -> list[bytes]:
    return [value.pack() for value in values]


def unframed(*messages: Any) -> list[bytes]:
    return [frames.pack(message)[frames.HEAD.size :] for message in messages]


HEADER = SampleHeader(
    task_id="t", prompt_id="p", reward=0.5, reward_parts={"exact": 1.0}, tokens=9, model_tokens=4, oldest_version=1,
    newest_version=2, drift=0.01, generator="g", turns=1, seconds=0.5, record=pack_record({"input": "2+2"}),
    turn_rewards=[0.5],
)  # fmt: skip
HEADERS = packed(
    HEADER.model_copy(update={"row_tokens": [4, 5]}),
    HEADER.model_copy(update={"turn_returns": [0.5, 1.0], "turn_tokens": [3, 4], "drift": None}),
    SampleHeader(task_id="t", prompt_id="", status="set_aside", reason="sandbox failed", retire=False),
)
TASKS = packed(
    Task(task_id="t1", prompt_id="p", prompt=[{"role": "user", "content": "é"}], answer=3, row={"level": {"a": [2.5]}}),
    Task(task_id="e0-1", prompt_id="p", kind="eval", prompt="2+2", answer=[1, "4"], evaluation="e0", keep=True),
)
COLUMNS: dict[str, Any] = {"sample_ids": ["a", "b"], "advantages": [0.1, -1.0], "rewards": [1.0, 0.0], "tokens": [5, 9]}
BATCHES = packed(
    Batch(batch_id=3, **COLUMNS), Batch(batch_id=3, **COLUMNS, turn_advantages=[[0.1, -0.5], [1.0]]),
    Batch(batch_id=3, **COLUMNS, row_tokens=[[], [4, 5]]),
)  # fmt: skip
EPISODE = Payload(
    np.arange(12, dtype=np.int32), np.array([[2, 5], [7, 10]], np.int32), np.linspace(-3, 0, 6, dtype=np.float32),
    np.array([[0, 0, 2], [1, 2, 6]], np.int32), np.array([6, 6], np.int32),
)  # fmt: skip
REQUESTS = packed(wire.Poll(have="a-1"), wire.Hello(), wire.Fetch(snapshot="a-1", chunk=1))
REPLIES = packed(
    wire.Manifest(
        snapshot="a-1", version=1, total_bytes=200, chunk_bytes=128, checksums=[1, 2**64 - 1], names=["w", "b"],
        dtypes=["float32", "bfloat16"], shapes=[[4, 4], [3]], offsets=[0, 64], check_token_ids=[1, 2],
        check_logprobs=[-1.0],
    ),
    wire.Chunk(snapshot="a-1", chunk=0), wire.Gone(snapshot="a-1"), wire.Welcome(path=["r"]),
    wire.Welcome(path=[], handover="0-1.sock", token="t"), wire.Refused(reason="no"),
)  # fmt: skip
RESULT = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "4\n", "stderr": ""}
ANSWERS = [
    {"status": "Success", "message": "", "compile_result": None, "run_result": RESULT, "files": {"a": "aGk="}},
    {"status": "Failed", "message": "x", "compile_result": RESULT, "run_result": RESULT | {"return_code": 1}},
]
CHAT = {"prompt": [{"role": "user", "content": "é"}], "answer": "x"}
ROWS = [{"prompt": "1+1", "answer": 2, "level": {"a": [1, None]}}, CHAT]
SCORES = [{"input": "1+1", "score": 1.0}, {"input": "user\n1+1\nassistant\n", "scores": [0.5, 1]}]
LINES = [b'{"input": "2+2", "messages": [{"role": "user", "content": "4"}]}', b'{"logprobs": [-0.5]}']
JOBS = unframed(
    [0, {"rewards": {"exact": {"options": {1: 2}}}, "memory_mb": 4096}],
    [1, "score", "exact", "4", "<call>", {"a": [1]}, {"level": {"a": [2.5]}}, "2+2", 9, 16, "stop", [0.5]],
)
RESULTS = unframed({"job": 1, "value": 0.5}, {"job": 1, "value": None}, {"job": 1, "error": "KeyError: 'answer'"})
STEPS = packed(Step(version=4, drift=0.1, metrics={"loss": 0.5}, checkpoint=True))

JSON: dict[str, Any] = {"read": from_json, "write": to_json}
ZIPPED: dict[str, Any] = {"read": unzipped, "write": lambda value: zlib.compress(to_json(value))}
BOUNDARIES: dict[str, Boundary] = {
    "msgpack": Boundary(TASKS, reads(lambda data: msgpack.packb(unpack(data))), (Unreadable,)),
    "task": Boundary(TASKS, wired(Task.unpack)),
    "header": Boundary(HEADERS, wired(SampleHeader.unpack)),
    "batch": Boundary(BATCHES, wired(Batch.unpack)),
    "step": Boundary(STEPS, wired(Step.unpack)),
    "payload": Boundary([encode_payload(EPISODE)], reads(payload)),
    "record": Boundary([zlib.compress(line) for line in LINES], reads(record), **ZIPPED),
    "weight request": Boundary(REQUESTS, wired(wire.unpack_request)),
    "weight reply": Boundary(REPLIES, wired(wire.unpack_reply), write=with_right_checksum),
    "sandbox answer": Boundary(
        [to_json(answer) for answer in ANSWERS], reads(parse_sandbox_answer), (RetryableError,), **JSON
    ),
    "reward job": Boundary(JOBS, reads(frames.unpack_job), (Unreadable,)),
    "reward result": Boundary(RESULTS, reads(reward_result), (Unreadable,)),
    "reward of tests": Boundary(
        [b"0.5", to_json({"reward": 1, "other": [2]})],
        reads(lambda data: reward_of(None, data, "")),
        (RewardFailed,),
        **JSON,
    ),
    "row": Boundary([to_json(row) for row in ROWS], rows, (), **JSON),
    "scores": Boundary([to_json(row) for row in SCORES], scores, (), **JSON),
}
