"""A multimodal folder of a hybrid model in bfloat16 learns to use a calculator, in a run that is killed and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from common.config import BrokerConfig
from common.model_files import weight_headers
from common.streams.broker import Broker, connect
from launcher.quickstart.inputs import write_inputs
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.quickstart.warm_start import train
from launcher.tasks import find_task
from tests.conftest import RedisServer
from tests.support.multimodal import tiny_multimodal
from tests.support.whole_run import kill, options, started, wait_for_version

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TASK = find_task("arithmetic")
STEPS = 20
RECIPE = {"steps": 200, "rows": 64}
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}


def save_warm_started(folder: Path) -> None:
    """A multimodal Qwen3.5 that mostly guesses, in bfloat16."""
    tokenizer = build_tokenizer(TASK.extra_tokens)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    untrained, trained = folder.with_name("untrained"), folder.with_name("trained")
    tiny_multimodal("qwen3_5", **SHAPE | ids).save_pretrained(untrained)
    tokenizer.save_pretrained(untrained)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other tests use the other cores, and threads that wait for each other would be slower
    train(untrained, trained, replace(TASK, recipe=replace(TASK.recipe, **RECIPE)))
    torch.set_num_threads(threads)
    AutoModelForImageTextToText.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def accuracy(broker: Broker, version: int) -> float:
    (result,) = [result for result in broker.evaluations() if result["version"] == version]
    return float(result["accuracy"])


def test_it_learns_through_kills_and_exports_the_whole_model(tmp_path: Path) -> None:
    save_warm_started(tmp_path / "warm")
    write_inputs(tmp_path, tmp_path / "warm", 0, task=TASK)
    server = RedisServer(tmp_path)
    server.start()
    broker, log = connect(BrokerConfig(url=server.url, dead_after=3.0), "vision"), tmp_path / "launcher.log"
    settings = {
        "run.name": "vision",
        "run.experiment": "vision",
        "run.output_dir": tmp_path / "runs",
        "run.steps": STEPS,
        "model.path": tmp_path / "model",
        "model.dtype": "bfloat16",
        "data.train": tmp_path / "train.jsonl",
        "data.heldout": tmp_path / "heldout.jsonl",
        "broker.dead_after": 3.0,
        "eval.every": STEPS,
    }
    command = ("run", TASK.template, "--plain", "--generators", "1", "--redis", server.url, *options(settings))
    try:
        with started(log, *command) as launcher:
            wait_for_version(broker, 4, launcher)
            kill(broker, "learner")
            wait_for_version(broker, 8, launcher)
            launcher.kill()
            launcher.wait()
        with started(log, *command) as launcher:
            assert launcher.wait(timeout=3000) == 0, log.read_text()[-3000:]
        assert accuracy(broker, 0) < 0.5
        assert accuracy(broker, STEPS) >= 0.8
    finally:
        server.kill()
    export = tmp_path / f"runs/vision/checkpoints/step_{STEPS}/hf"
    assert weight_headers(export)[0].keys() == weight_headers(tmp_path / "model")[0].keys()
    AutoModelForImageTextToText.from_pretrained(export)
