"""An answer that is a number: text, JSON's and Parquet's numbers get the same reward, by ours and by the README's."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from common.config import DataConfig
from common.messages import Task
from generator.rewards import Outcome
from generator.rewards.registry import make_reward
from sampler.prompts import load_prompts
from tests.support.http_double import says, serve

README = Path(__file__).parents[4] / "README.md"
RIGHT, WRONG = ("79", r"<think>7*11+2</think> So \boxed{79}"), ("78", r"<think>7*11+1</think> So \boxed{78}")
ANSWERS: dict[str, Any] = {
    "text": "79", "integer": 79, "float": 79.0, "int64": pa.int64(), "int8": pa.int8(), "double": pa.float64(),
    "string": pa.string(),
}  # fmt: skip


@pytest.fixture(params=ANSWERS)
def answer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The answer as a generator gets it: read from a file, and sent in a task."""
    kind, path = ANSWERS[request.param], tmp_path / "a.jsonl"
    if isinstance(kind, pa.DataType):
        path = tmp_path / "a.parquet"
        value = "79" if kind == pa.string() else 79
        pq.write_table(pa.table({"prompt": ["7*11+2"], "answer": pa.array([value], kind)}), path)
    else:
        path.write_text(json.dumps({"prompt": "7*11+2", "answer": kind}) + "\n")
    prompt = load_prompts(DataConfig(train=str(path)).sources("train"), structlog.get_logger())[0]
    task = Task(task_id="t", prompt_id="p", prompt=prompt.prompt, answer=prompt.answer)
    return Task.unpack(task.pack()).answer


def test_every_reward_sees_the_same_answer(answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?def shorter_is_better.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "readme_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "readme_rewards", raising=False)
    for name in ("exact", "boxed", "boxed_think", "math", "readme_rewards:shorter_is_better"):
        reward = make_reward(name, {})
        plain = name in ("exact", "readme_rewards:shorter_is_better")
        outcomes = [Outcome(text if plain else boxed, response=boxed, answer=answer) for text, boxed in (RIGHT, WRONG)]
        assert [float(reward.score(outcome)) for outcome in outcomes] == [1.0, 0.0], name


def test_a_judge_is_shown_the_same_answer(answer: Any) -> None:
    async def scene(url: str) -> None:
        judge = make_reward("judge", {"base_url": f"{url}/v1", "model": "tiny", "template": "is it {answer}?"})
        await judge.score(Outcome("79", answer=answer))
        await judge.close()

    with serve(says("Score: 1")) as double:
        asyncio.run(scene(double.url))
    assert double.requests[0]["messages"][0]["content"] == "is it 79?"
