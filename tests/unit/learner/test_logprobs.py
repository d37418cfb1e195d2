"""Log-probs: in chunks they equal whole ones without the memory, and past versions give those of their own weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from common.payload import Payload
from learner import memory_model
from learner.batch.tensors import MicroBatch, RolloutBatch
from learner.past_versions import PastVersions, exact_statistics, in_own_turn
from learner.policy.logprobs import LogitTransform, LogprobHead, chunk_of
from learner.policy.model import Policy
from tests.support.learner import ALONE, PACKER, make_payload, policy_of

N, H, V = 50, 16, 33


def head_of(
    chunk: int,
    temperature: float,
    bias: bool,
    dtype: torch.dtype = torch.float32,
    transform: LogitTransform | None = None,
) -> LogprobHead:
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=dtype)
    LogprobHead.adopt(head, chunk, temperature, transform=transform)
    return head


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, H, dtype=dtype, requires_grad=True), torch.randint(V, (N,))


def whole(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, others: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    values = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    return values if others is None else (*values, log_p.gather(1, others))


@pytest.mark.parametrize(("chunk", "temperature"), [(7, 0.7), (1000, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (0.8, 1.0), (0.8, 2.5), (None, 0.25)])
def test_values_and_gradients_equal_those_of_a_whole_log_softmax(chunk, temperature, bias, k, softcap, scale):
    """Of the targets, of k other ids at each place, and of the entropy."""
    torch.manual_seed(2)
    towards_logprobs, towards_entropy, towards_others = torch.randn(N), torch.randn(N), torch.randn(N, k)
    others = torch.rand(N, V).argsort(1)[:, :k] if k else None
    head, results = head_of(chunk, temperature, bias, transform=LogitTransform(softcap, scale)), []
    for is_chunked in (True, False):
        hidden, targets = inputs()
        head.zero_grad()
        # Without targets it is an ordinary output layer.
        if is_chunked:
            values = head(hidden, targets, entropy=True, others=others)
        else:
            logits = head(hidden) if softcap is None else softcap * torch.tanh(head(hidden) / softcap)
            values = whole(logits * scale, targets, temperature, others)
        logprobs, entropy, *more = values
        total = logprobs @ towards_logprobs + entropy @ towards_entropy
        sum(((one * towards_others).sum() for one in more), total).backward()
        results.append([*values, hidden.grad, *(parameter.grad.clone() for parameter in head.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 if k else 1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest float32 tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_of_all_tokens_and_all_words_is_ever_made():
    tokens, words, chunk = 512, 512, 64
    head = nn.Linear(4, words, bias=False)
    LogprobHead.adopt(head, chunk, 1.0)
    hidden = torch.randn(tokens, 4, requires_grad=True)
    targets, others = torch.randint(words, (tokens,)), torch.randint(words, (tokens, 8))
    with LargestTensor() as largest:
        logprobs, _, of_others = head(hidden, targets, entropy=True, others=others)
        (logprobs.sum() + of_others.sum()).backward()
    assert largest.numel <= chunk * words


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_asks_the_device_for_a_number(dtype, entropy):
    """Fake tensors have none: `item`, `bool`, `tolist` and `nonzero` raise on them, where a GPU would be waited for."""
    with FakeTensorMode():
        head = head_of(7, 0.7, True, dtype)
        hidden = torch.empty(N, H, dtype=dtype, requires_grad=True)
        targets, others = torch.empty(N, dtype=torch.int64), torch.empty(N, 3, dtype=torch.int64)
        logprobs, entropies, of_others = head(hidden, targets, entropy=entropy, others=others)
        (logprobs.sum() + entropies.sum() + of_others.sum()).backward()
        assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_float32", "tolerance"), [(True, 1e-5), (False, 0.05)])
def test_bfloat16_weights_give_nearly_exact_float32_logprobs(bias, in_float32, tolerance):
    head = head_of(8, 0.5, bias, torch.bfloat16)
    head.in_float32 = in_float32
    hidden, targets = inputs(torch.bfloat16)
    logprobs, entropy = head(hidden, targets, entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    exact = whole(hidden.float() @ head.weight.float().T + (head.bias.float() if bias else 0), targets, 0.5)
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close((logprobs, entropy), exact, rtol=0, atol=tolerance)
    # Rounded logits are far from what float32 ones are near to.
    assert in_float32 or (logprobs - exact[0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("vocabulary", "gpu_gb", "tokens"),
    [(151_936, 0, 1024), (151_936, 24, 1024), (151_936, 80, 2048), (32_000, 80, 9216)],
)
def test_a_large_gpu_computes_more_tokens_at_once(vocabulary, gpu_gb, tokens):
    assert chunk_of(vocabulary, gpu_gb * 10**9) == tokens


def test_the_memory_model_finds_the_peak_of_all_chunks_in_a_few(model, monkeypatch):
    config, micro = AutoConfig.from_pretrained(model), memory_model.Micro((60, 40), prompt=1, chunk=8)
    few = memory_model.peak_activations(config, micro)
    monkeypatch.setattr(memory_model, "FEW_CHUNKS", 100)
    assert few == memory_model.peak_activations(config, micro) > 0


VERSIONS = 4


def step(policy: Policy, seed: int, share: float) -> None:
    """Change about so large a share of each parameter."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            moves = torch.rand(parameter.shape, generator=noise) < share
            parameter += moves * 0.1 * torch.randn(parameter.shape, generator=noise)


def copy_of(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters()]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@torch.no_grad()
def score(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    logprobs, _ = policy(micro.input_ids, micro.position_ids, micro.sequences, micro.predict, micro.targets)
    return logprobs[: micro.model_tokens]


@pytest.mark.parametrize(("share", "dtype"), [(0.02, torch.bfloat16), (0.4, torch.float32), (1.0, torch.bfloat16)])
def test_every_version_comes_back_bit_for_bit(model, share, dtype):
    policy = policy_of(model).to(dtype)
    past, versions = PastVersions(policy.parameters(), VERSIONS), [copy_of(policy)]
    for version in range(1, VERSIONS + 3):
        step(policy, version, share)
        past.advance()
        versions.append(copy_of(policy))
    with torch.no_grad():
        next(policy.parameters()).view(-1)[0] = torch.nan  # is equal to nothing, but is itself
    past.advance()
    versions.append(copy_of(policy))
    for _ in range(2):
        with past.travel() as back:
            seen = [(age, copy_of(policy)) for age in back]
        assert [age for age, _ in seen] == [1, 2, 3, 4]
        for age, weights in seen:
            assert all(map(same_bits, weights, versions[-1 - age]))
        assert all(map(same_bits, copy_of(policy), versions[-1]))
    whole = sum(parameter.nbytes for parameter in policy.parameters())
    assert past.bytes <= VERSIONS * whole
    assert share > 0.1 or past.bytes < 0.15 * VERSIONS * whole


def test_the_weights_come_back_if_scoring_fails(model):
    policy = policy_of(model)
    past = PastVersions(policy.parameters(), VERSIONS)
    step(policy, 1, 1.0)
    past.advance()
    now = copy_of(policy)

    def fails() -> None:
        with past.travel() as back:
            next(back)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert all(map(torch.equal, copy_of(policy), now))


def test_the_engines_gap_is_told_from_staleness(model):
    """The engine is off by a constant, so its gap is known; staleness is what the weights' own scores say."""
    policy = policy_of(model)
    past = PastVersions(policy.parameters(), VERSIONS)
    rng, off = np.random.default_rng(0), 0.25
    payloads = [make_payload(rng, 40, version) for version in (1, 3, 5, 6)]
    engine: dict[int, list[np.ndarray]] = {}
    for version in range(7):
        if version:
            step(policy, version, 0.3)
            past.advance()
        engine[version] = [score(policy, PACKER.micro_batch([(one, 0.0)])).numpy() + off for one in payloads]
    rows = []
    for number, payload in enumerate(payloads):
        own = [engine[version][number][at] for at, version in enumerate(payload.versions().tolist())]
        rows.append(Payload(payload.token_ids, payload.model_spans, np.float32(own), payload.version_spans))
    micros = [PACKER.micro_batch([(row, 0.0) for row in part]) for part in (rows[:2], rows[2:])]
    batch = RolloutBatch(6, [micros], len(rows), [], rewards=[0.0] * len(rows))
    metrics = exact_statistics(batch, past, lambda micro: score(policy, micro), ALONE)
    versions = np.concatenate([row.versions() for row in rows])
    own = np.concatenate([in_own_turn(micro).numpy() for micro in batch.mini_batches[0]])
    kept = (versions >= 6 - VERSIONS) & own
    assert 0 < kept.mean() < own.mean() < 1
    assert metrics["exact/mixed"] == pytest.approx(1 - own.mean())
    assert metrics["exact/scored"] == pytest.approx(kept.mean())
    assert metrics["exact/engine_gap"] == pytest.approx(off, abs=1e-5)
    assert metrics["exact/engine_kl"] == pytest.approx(np.exp(-off) - 1 + off, abs=1e-5)
    now = np.concatenate([engine[6][number] for number in range(len(rows))])
    moved = np.abs(now - np.concatenate([row.logprobs for row in rows]))
    assert metrics["exact/staleness_gap"] == pytest.approx(moved[kept].mean(), rel=1e-4)
    assert metrics["exact/age_0/staleness_gap"] == 0.0
    assert metrics["exact/age_1/staleness_gap"] == pytest.approx(moved[(versions == 5) & own].mean(), rel=1e-4)
    assert "exact/age_5_plus/staleness_gap" not in metrics


def test_what_is_sampled_after_an_update_within_a_turn_is_of_no_version_alone():
    turns = np.array([[2, 5], [7, 11]], np.int32)  # of two rows, the first of which the update finds in its second turn
    versions = np.array([[3, 0, 5], [4, 5, 7]], np.int32)
    ids, logprobs = np.arange(11, dtype=np.int32), np.zeros(7, np.float32)
    rows = [Payload(ids, turns, logprobs, versions), Payload(ids, turns, logprobs, np.array([[4, 0, 7]], np.int32))]
    micro = PACKER.micro_batch([(row, 0.0) for row in rows])
    assert in_own_turn(micro).tolist() == [True] * 5 + [False] * 2 + [True] * 7
    assert in_own_turn(PACKER.micro_batch([])).tolist() == []
