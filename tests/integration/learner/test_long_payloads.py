"""A sample of 64k tokens goes from a generator through Redis to ranks that divide it, and is trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import redis
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.messages import Batch
from common.payload import open_record, pack_record
from common.streams.batches import BatchInbox
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from tests.conftest import RedisServer
from tests.support.learner import VOCABULARY, learner_config, make_payload
from tests.support.ranks import on_ranks
from tests.support.streams import finished, leased

if TYPE_CHECKING:
    from learner.ranks.world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOKENS, RANKS = 65_536, 2


@pytest.fixture
def model(tmp_path: Path) -> str:
    """One layer, and a head for each rank: attention takes time in proportion to TOKENS squared."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "vocab_size": VOCABULARY}
    heads = {"num_hidden_layers": 1, "num_attention_heads": RANKS, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=TOKENS)).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def train_on_batch(world: World, url: str, model: str, folder: str) -> None:
    """One rank: trains on the batch that is in Redis; leaves the step's metrics."""
    from learner.trainer import Trainer

    config = learner_config(model, folder, sequence_parallel=RANKS)
    broker, world = Broker(redis.Redis.from_url(url), "test"), world.in_groups(RANKS)
    ((_, fields),) = broker.redis.xrange(broker.key("batches"))
    trainer = Trainer(config, world)
    fetch = BatchInbox(broker).payloads
    share = trainer.packer().own_share(Batch.unpack(fields[b"batch"]), fetch, config.learner, world)
    Path(folder, f"metrics.{world.rank}").write_text(json.dumps(trainer.train(share)))


def test_a_sample_of_64k_tokens_is_trained_on(
    real_broker: Broker, redis_server: RedisServer, model: str, tmp_path: Path
) -> None:
    payload = make_payload(np.random.default_rng(0), TOKENS)
    sampled, prompt = len(payload.logprobs), int(payload.model_spans[0, 0])
    ledger = SamplerLedger(real_broker, "first")
    ledger.acquire()
    inbox, (delivery,) = leased(ledger, 1)
    response = "each token is many bytes" * (TOKENS - prompt)
    episode = {"prompt": "p" * prompt, "response": response, "token_ids": payload.token_ids}
    record = pack_record(episode | {"logprobs": payload.logprobs})
    result = finished(delivery, tokens=TOKENS, model_tokens=sampled, record=record)
    assert inbox.finish([replace(result, payload=payload)]) == 1
    ((entry, header),) = ledger.read(block_ms=0)
    assert header.record is not None
    kept = json.loads(open_record(header.record))
    assert (kept["response"], kept["left_out"]) == (response, ["tokens"])
    batch = Batch(batch_id=0, sample_ids=[header.task_id], advantages=[1.0], rewards=[1.0], tokens=[header.tokens])
    ledger.commit(Commit(counted=[entry], batches=[batch]))

    on_ranks(RANKS, train_on_batch, redis_server.url, model, str(tmp_path), folder=tmp_path)
    first, second = (json.loads((tmp_path / f"metrics.{rank}").read_text()) for rank in range(RANKS))
    for name in ("batch/left_out", "tokens/total", "tokens/model", "actor/grad_norm", "actor/loss"):
        assert first[name] == second[name], name
    assert (first["batch/left_out"], first["tokens/total"], first["tokens/model"]) == (0, TOKENS, sampled)
    assert first["actor/grad_norm"] > 0
    assert first["actor/skipped_steps"] == 0
    assert real_broker.redis.xlen(real_broker.key("dead")) == 0
