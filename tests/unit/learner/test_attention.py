"""Packed sequences attend to themselves alone, also divided over ranks; which attention the learner takes, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3Config
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from common.config import LearnerConfig, parse_config
from common.errors import UserError
from learner.policy import kernels
from learner.policy.attention import PACKED_VARLEN, across_ranks, pack_sequences, packed_sdpa, packed_varlen
from learner.policy.kernels import apply_kernels, choose_attention
from learner.policy.model import Policy, load_policy, own_slice
from learner.ranks.ulysses import SequenceGroup
from tests.support.attention import tensors_of, varlen_reference
from tests.support.learner import VOCABULARY, save_tiny_model

LENGTHS = [7, 31, 12, 1, 30, 16]


PACKED = {"sdpa": packed_sdpa, "varlen": partial(packed_varlen, varlen_reference)}


def attend(kernel: Callable[..., Any], tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    return kernel(torch.nn.Module(), *tensors, None, sequences=pack_sequences(LENGTHS), **options)[0]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5, "scaling": 0.3}], ids=str)
def test_each_sequence_gets_what_it_gets_alone(options):
    outputs, gradients = [], []
    for kernel in PACKED.values():
        tensors = [tensor.requires_grad_() for tensor in tensors_of(LENGTHS)]
        outputs.append(attend(kernel, tensors, **options))
        (outputs[-1] * torch.arange(outputs[-1].numel()).view_as(outputs[-1]).cos()).sum().backward()
        gradients.append([tensor.grad for tensor in tensors])
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


@pytest.mark.integration
def test_torchs_kernel_trains_a_policy_without_a_host_sync(tmp_path):
    """Shapes alone, on fake tensors, which refuse whatever would have the host wait for the device."""
    config, lengths = AutoConfig.from_pretrained(save_tiny_model(tmp_path)), [9, 4]
    sequences = pack_sequences(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_VARLEN)
        policy = Policy(model.train(), chunk=3, temperature=0.7)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        predict = torch.tensor([2, 3, 4, 5, 10])
        logprobs, entropies = policy(torch.zeros_like(positions), positions, sequences, predict, predict, entropy=True)
        (logprobs.sum() + entropies.sum()).backward()
        assert logprobs.shape == entropies.shape == (5,)
        assert model.get_input_embeddings().weight.grad.shape == (VOCABULARY, config.hidden_size)
        assert all(parameter.grad.shape == parameter.shape for parameter in policy.parameters())


def test_nan_of_neighbours_reaches_neither_values_nor_gradients():
    clean = attend(packed_sdpa, tensors_of(LENGTHS))[:, 7:38]
    tensors = tensors_of(LENGTHS)
    for tensor in tensors:
        tensor[:, :, :7] = torch.nan
        tensor.requires_grad_()
    output = attend(packed_sdpa, tensors)[:, 7:38]
    assert torch.equal(output, clean)
    output.square().sum().backward()
    for tensor in tensors:
        assert not tensor.grad[:, :, 38:].any()
        assert tensor.grad[:, :, 7:38].any()


def test_no_row_is_padded_to_more_than_twice_its_length():
    rows = pack_sequences([100, 60, 50, 49, 20, 3, 2]).padded
    assert [group.shape for group in rows] == [(3, 100), (1, 49), (1, 20), (2, 3)]


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_take_their_share_of_every_softmax(window):
    """As gpt-oss computes a sequence alone: one more column of scores, which is left out after the softmax."""
    sinks = torch.tensor([2.0, -1.0, 0.5, 9.0], dtype=torch.float64)
    ways = []
    for is_packed in (True, False):
        q, k, v, s = (tensor.clone().requires_grad_() for tensor in (*tensors_of(LENGTHS), sinks))
        if is_packed:
            output = attend(packed_sdpa, [q, k, v], s_aux=s, sliding_window=window, scaling=0.3)
        else:
            module, outputs = SimpleNamespace(num_key_value_groups=2, sinks=s, training=False), []
            for part in zip(*(tensor.split(LENGTHS, dim=2) for tensor in (q, k, v)), strict=True):
                back = torch.arange(part[0].shape[2])[:, None] - torch.arange(part[0].shape[2])
                mask = torch.where((back >= 0) & (back < (window or 99)), 0.0, -torch.inf)
                outputs.append(gpt_oss_attention(module, *part, mask, scaling=0.3)[0])
            output = torch.cat(outputs, dim=1)
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        ways.append([output, q.grad, k.grad, v.grad, s.grad])
    torch.testing.assert_close(*ways)


@pytest.mark.parametrize(("name", "part"), [("sdpa", "softcap"), ("varlen", "softcap"), ("varlen", "s_aux")])
def test_parts_of_attention_that_are_missing_are_refused(name, part):
    other = "sdpa" if part == "s_aux" else "flash_attention_2"
    with pytest.raises(UserError, match=f"uses {part}, .*; set learner.attention={other}$"):
        attend(PACKED[name], tensors_of(LENGTHS), **{part: torch.ones(4)})


BOTH = ("liger_kernel", "triton")
FLASH = ("flash_attn",)


def model_with(head_dim: int = 64) -> Qwen3Config:
    return Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=head_dim)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpu: bool = True,
    capability: tuple[int, int] = (9, 0),
    varlen: bool = True,
    packages: tuple[str, ...] = (),
) -> None:
    """Pretend that a GPU, torch's variable-length attention and packages are there or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernels.attention, "varlen_attn", print if varlen else None)

    def find(name: str, *rest: Any) -> Any:
        return (object() if name in packages else None) if name in (*BOTH, *FLASH) else find_spec(name, *rest)

    monkeypatch.setattr(kernels.importlib.util, "find_spec", find)


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "chosen", "because"),
    [
        ({}, "bfloat16", 64, "varlen", "first choice"),
        ({"varlen": False, "packages": FLASH}, "bfloat16", 64, "flash_attention_2", "torch.nn.attention.varlen"),
        ({"varlen": False}, "bfloat16", 64, "sdpa", "flash-attn is not installed"),
        ({"capability": (7, 5), "packages": FLASH}, "bfloat16", 64, "sdpa", "capability 7.5"),
        ({"packages": FLASH}, "bfloat16", 100, "sdpa", "100"),
    ],
)
def test_auto_takes_the_first_that_can_be_used_and_says_why(monkeypatch, machine, dtype, head_dim, chosen, because):
    pretend(monkeypatch, **machine)
    choice = choose_attention(LearnerConfig(dtype=dtype), model_with(head_dim))
    assert choice.name == chosen
    assert because in choice.reason


def test_a_model_with_sinks_is_computed_where_sinks_are(monkeypatch):
    pretend(monkeypatch, packages=FLASH)
    choice = choose_attention(LearnerConfig(dtype="bfloat16"), GptOssConfig())
    assert (choice.name, choice.reason) == ("sdpa", "varlen, flash_attention_2: the model's attention has sinks")


@pytest.mark.parametrize(
    ("asked", "machine", "settings", "why"),
    [
        ("varlen", {"gpu": False}, {}, "no GPU"),
        ("varlen", {"varlen": False}, {}, "torch.nn.attention.varlen"),
        ("varlen", {}, {"dtype": "float32"}, "float32"),
        ("flash_attention_2", {}, {}, "not installed"),
        ("flash_attention_2", {"packages": FLASH}, {"sequence_parallel": 2}, "for varlen and sdpa only"),
        ("varlen", {}, {}, None),
        ("varlen", {}, {"sequence_parallel": 2}, None),
        ("flash_attention_2", {"packages": FLASH}, {}, None),
        ("sdpa", {}, {}, None),
    ],
)
def test_an_attention_that_is_named_is_taken_or_refused(monkeypatch, asked, machine, settings, why):
    pretend(monkeypatch, **machine)
    config = LearnerConfig(attention=asked, **settings)
    if why is None:
        assert choose_attention(config, model_with()).name == asked
        return
    with pytest.raises(UserError, match=f"learner.attention = '{asked}' cannot be used: .*{why}"):
        choose_attention(config, model_with())


@pytest.mark.parametrize(
    ("machine", "known", "why"),
    [
        ({"packages": ("triton",)}, "qwen3", "needs the package liger_kernel"),
        ({"packages": ("liger_kernel",)}, "qwen3", "needs the package triton"),
        ({"packages": BOTH, "gpu": False}, "qwen3", "needs a GPU"),
        ({"packages": BOTH}, "llama", "none for models of type qwen3"),
        ({"packages": BOTH}, "qwen3", None),
    ],
)
def test_liger_leaves_the_output_layer_alone_or_is_refused(monkeypatch, machine, known, why):
    pretend(monkeypatch, **machine)
    calls: list[Any] = []
    module: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {known: print}
    module._apply_liger_kernel_to_instance = lambda model, **options: calls.append((model, options))
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model: Any = SimpleNamespace(config=model_with())
    if why is None:
        apply_kernels(model, "liger")
        assert calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]
        return
    with pytest.raises(UserError, match=f"learner.kernels = 'liger'.*{why}"):
        apply_kernels(model, "liger")


SINKS = torch.linspace(-2, 2, 8, dtype=torch.float64)  # of eight heads


@dataclass(frozen=True, slots=True)
class Thread(SequenceGroup):
    """A rank that is a thread; `sent` and `barrier` are shared by all."""

    sent: dict[int, torch.Tensor] = field(default_factory=dict)
    barrier: Barrier = field(default_factory=lambda: Barrier(1))

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        self.sent[self.rank] = parts
        self.barrier.wait()
        received = torch.stack([self.sent[rank][self.rank] for rank in range(self.size)])
        self.barrier.wait()
        return received


def on_threads(size: int, act: Any) -> list[Any]:
    """What `act(group)` returns on each of so many ranks."""
    sent: dict[int, torch.Tensor] = {}
    barrier = Barrier(size, timeout=600)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: act(Thread(rank, size, None, sent, barrier)), range(size)))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("lengths", [[7, 12, 1, 9], [3]], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"s_aux": SINKS}], ids=["all", "window", "sinks"])
def test_attention_over_slices_is_attention_over_all(size, lengths, options):
    """Also with fewer heads of keys than ranks, fewer tokens than ranks, and values of another width."""
    tokens, attention = sum(lengths), across_ranks(packed_sdpa)
    torch.manual_seed(0)
    shapes = (8, 4), (2, 4), (2, 6)  # heads and width of queries, keys and values
    tensors = [torch.randn(1, heads, tokens, width, dtype=torch.float64) for heads, width in shapes]
    padding = -tokens % size

    def on_rank(group: SequenceGroup) -> torch.Tensor:
        slices = [torch.nn.functional.pad(tensor, (0, 0, 0, padding)).chunk(size, 2)[group.rank] for tensor in tensors]
        sequences = pack_sequences(lengths).divided(group, padding)
        return attention(torch.nn.Module(), *slices, None, sequences=sequences, **options)[0]

    joined = torch.cat(on_threads(size, on_rank), dim=1)[:, :tokens]
    expected, _ = attention(torch.nn.Module(), *tensors, None, sequences=pack_sequences(lengths), **options)
    torch.testing.assert_close(joined, expected)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5, 8, 17])
def test_each_target_is_predicted_by_the_rank_that_has_its_token(size, tokens):
    ids, positions = torch.arange(100, 100 + tokens)[None], torch.arange(tokens)[None]
    predict = torch.arange(tokens)[tokens // 2 :]
    slices = [
        own_slice(SequenceGroup(rank, size, None), ids, positions, pack_sequences([tokens]), predict, predict + 1)
        for rank in range(size)
    ]
    assert len({own_ids.shape for own_ids, *_ in slices}) == 1
    assert torch.cat([own_ids for own_ids, *_ in slices], 1)[:, :tokens].equal(ids)
    seen = [own_ids[0, at] for own_ids, _, _, at, _, _ in slices]
    assert torch.cat(seen).tolist() == (100 + predict).tolist()
    assert torch.cat([targets for *_, targets, _ in slices]).equal(predict + 1)
    for *_, counts in slices:
        assert counts == [len(of_rank) for of_rank in seen]


@pytest.mark.parametrize(("size", "fits"), [(4, True), (3, False), (8, False)])
def test_a_number_that_does_not_fit_the_heads_is_refused(tmp_path, size, fits):
    """The model has 4 heads of queries and 2 of keys."""
    settings = {"model": {"path": save_tiny_model(tmp_path)}, "data": {"train": "none.jsonl"}}
    config = parse_config(settings | {"learner": {"sequence_parallel": size, "dtype": "float32"}})
    if fits:
        load_policy(config, weights=False)
        return
    with pytest.raises(
        UserError, match=f"sequence_parallel = {size} does not fit the model's 4 heads of queries, 2 of"
    ):
        load_policy(config, weights=False)
