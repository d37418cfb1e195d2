"""Packed rows and trees of prefixes attend to their own tokens alone, also over ranks; which attention is taken."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GptOssConfig, Qwen3Config

from common.config import LearnerConfig
from common.errors import UserError
from learner.batch.prefixes import PackedRows, pack_rows, tree_places
from learner.policy import kernels
from learner.policy.attention import PACKED_VARLEN, across_ranks, pack_sequences, packed_sdpa, packed_varlen
from learner.policy.kernels import apply_liger, choose_attention, choose_kernels
from learner.policy.model import Policy, own_slice
from learner.ranks.ulysses import SequenceGroup
from tests.support.learner import VOCABULARY, policy_of

LENGTHS = [7, 31, 12, 1, 30, 16]


def tensors_of(tokens: int) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, 8 wide, [1, H, T, 8] each."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


def varlen_reference(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`varlen_attn` as torch documents it: each sequence alone, with an explicit mask; on any device."""
    call = inspect.signature(varlen_attn).bind(*args, **kwargs)
    call.apply_defaults()
    a = SimpleNamespace(**call.arguments)
    assert a.cu_seq_q.dtype == a.cu_seq_k.dtype == torch.int32
    assert (a.max_q, a.max_k) == (a.cu_seq_q.diff().max(), a.cu_seq_k.diff().max())
    assert a.query.stride(-1) == a.key.stride(-1) == a.value.stride(-1) == 1
    assert a.enable_gqa or a.query.shape[1] == a.key.shape[1]
    before, after = a.window_size
    outputs = []
    for start, end in zip(a.cu_seq_q[:-1].tolist(), a.cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (a.query, a.key, a.value))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        mask = (back <= before if before >= 0 else True) & ((-back <= after) if after >= 0 else back == back)
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=a.scale, enable_gqa=a.enable_gqa
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


PACKED = {"sdpa": packed_sdpa, "varlen": partial(packed_varlen, varlen_reference)}


def attend(kernel: Callable[..., Any], tensors: list[torch.Tensor], sequences: Any = None, **options: Any) -> Any:
    packed = pack_sequences(LENGTHS) if sequences is None else sequences
    return kernel(torch.nn.Module(), *tensors, None, sequences=packed, **options)[0]


def with_gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
    return [output, *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5, "scaling": 0.3}], ids=str)
def test_each_sequence_gets_what_it_gets_alone(options):
    ways = []
    for kernel in PACKED.values():
        tensors = tensors_of(sum(LENGTHS))
        ways.append(with_gradients(attend(kernel, tensors, **options), tensors))
    torch.testing.assert_close(*ways)


@pytest.mark.integration
def test_torchs_kernel_trains_a_policy_without_a_host_sync(model):
    """Shapes alone, on fake tensors, which refuse whatever would have the host wait for the device."""
    config, lengths = AutoConfig.from_pretrained(model), [9, 4]
    sequences = pack_sequences(lengths)
    with FakeTensorMode(allow_non_fake_inputs=True):
        causal = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_VARLEN)
        policy = Policy(causal.train(), chunk=3, temperature=0.7)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        predict = torch.tensor([2, 3, 4, 5, 10])
        logprobs, entropies = policy(torch.zeros_like(positions), positions, sequences, predict, predict, entropy=True)
        (logprobs.sum() + entropies.sum()).backward()
        assert logprobs.shape == entropies.shape == (5,)
        assert causal.get_input_embeddings().weight.grad.shape == (VOCABULARY, config.hidden_size)
        assert all(parameter.grad.shape == parameter.shape for parameter in policy.parameters())


def test_nan_of_neighbours_reaches_neither_values_nor_gradients():
    clean = attend(packed_sdpa, tensors_of(sum(LENGTHS)))[:, 7:38]
    tensors = tensors_of(sum(LENGTHS))
    for tensor in tensors:
        tensor.data[:, :, :7] = torch.nan
    output = attend(packed_sdpa, tensors)[:, 7:38]
    assert torch.equal(output, clean)
    output.square().sum().backward()
    for tensor in tensors:
        assert not tensor.grad[:, :, 38:].any()
        assert tensor.grad[:, :, 7:38].any()


def test_no_row_is_padded_to_more_than_twice_its_length():
    rows = pack_sequences([100, 60, 50, 49, 20, 3, 2]).padded
    assert [group.shape for group in rows] == [(3, 100), (1, 49), (1, 20), (2, 3)]


@pytest.mark.parametrize("part", ["softcap", "s_aux"])
def test_parts_of_attention_that_are_missing_are_refused(part):
    with pytest.raises(UserError, match=f"uses {part}, which varlen lacks; set learner.attention=sdpa$"):
        attend(PACKED["varlen"], tensors_of(sum(LENGTHS)), **{part: torch.ones(4)})


def test_a_layer_whose_attention_is_chunked_stays_in_the_tokens_chunk():
    types = ["full_attention", "chunked_attention"]
    layer = SimpleNamespace(config=SimpleNamespace(layer_types=types, attention_chunk_size=8), layer_idx=1)
    tensors = tensors_of(sum(LENGTHS))
    chunks = [min(8, length - start) for length in LENGTHS for start in range(0, length, 8)]
    output, _ = packed_sdpa(layer, *tensors, None, sequences=pack_sequences(LENGTHS))
    torch.testing.assert_close(output, attend(packed_sdpa, tensors, pack_sequences(chunks)))


def test_models_with_packed_varlen_run_torchs_own_function():
    registered: Any = AttentionInterface()[PACKED_VARLEN]
    while hasattr(registered, "__wrapped__"):
        registered = registered.__wrapped__
    assert registered.args == (varlen_attn,)


BOTH = ("liger_kernel", "triton")
FLASH = ("flash_attn",)
QWEN3 = Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=64)
ODD_HEADS = Qwen3Config(hidden_size=256, num_attention_heads=4, head_dim=100)


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
    ("machine", "model", "chosen", "because"),
    [
        ({}, QWEN3, "varlen", "first choice"),
        ({"varlen": False, "packages": FLASH}, QWEN3, "flash_attention_2", "torch.nn.attention.varlen"),
        ({"varlen": False}, QWEN3, "sdpa", "flash-attn is not installed"),
        ({"capability": (7, 5), "packages": FLASH}, QWEN3, "sdpa", "capability 7.5"),
        ({"packages": FLASH}, ODD_HEADS, "sdpa", "100"),
        ({"packages": FLASH}, GptOssConfig(), "sdpa", "varlen, flash_attention_2: the model's attention has sinks"),
    ],
    ids=["varlen", "no varlen", "neither", "an old GPU", "head size", "sinks"],
)
def test_auto_takes_the_first_that_can_be_used_and_says_why(monkeypatch, machine, model, chosen, because):
    pretend(monkeypatch, **machine)
    choice = choose_attention(LearnerConfig(dtype="bfloat16"), model)
    assert choice.name == chosen
    assert because in choice.reason


@pytest.mark.parametrize(
    ("capability", "model", "installed", "expected"),
    [
        ((8, 0), QWEN3, {"FA3", "FA4"}, "by torch's own FA2"),
        ((9, 0), QWEN3, {"FA3", "FA4"}, "by FA3 of flash_attn_interface"),
        ((10, 0), QWEN3, {"FA3", "FA4"}, "by FA4 of flash_attn.cute.interface"),
        ((10, 0), Qwen3Config(head_dim=256), {"FA3", "FA4"}, "by torch's own FA2"),
        ((9, 0), QWEN3, {}, "by torch's own FA2, because FA3 cannot be used: No module named 'flash_attn_interface'"),
    ],
)
def test_varlen_uses_the_newest_flash_attention_that_the_gpu_and_the_packages_allow(
    monkeypatch, capability, model, installed, expected
):
    """Without the package torch's own function is called, which imports it."""
    pretend(monkeypatch, capability=capability)
    activate, active = torch.nn.attention.activate_flash_attention_impl, []
    monkeypatch.setattr(
        torch.nn.attention,
        "activate_flash_attention_impl",
        lambda name: active.append(name) if name in installed else activate(name),
    )
    for asked in ("auto", "varlen"):
        choice = choose_attention(LearnerConfig(dtype="bfloat16", attention=asked), model)
        assert choice.reason.endswith(expected)
    assert [name for name in active if name in expected] == active


@pytest.mark.parametrize(
    ("asked", "machine", "settings", "why"),
    [
        ("varlen", {"gpu": False}, {}, "no GPU"),
        ("varlen", {"varlen": False}, {}, "torch.nn.attention.varlen"),
        ("varlen", {}, {"dtype": "float32"}, "float32"),
        ("flash_attention_2", {}, {}, "not installed"),
        ("flash_attention_2", {"packages": FLASH}, {"sequence_parallel": 2}, "with varlen and sdpa only"),
        ("varlen", {}, {}, None),
        ("varlen", {}, {"sequence_parallel": 2}, None),
        ("flash_attention_2", {"packages": FLASH}, {}, None),
        ("sdpa", {}, {}, None),
    ],
)
def test_an_attention_that_is_named_is_taken_or_refused(monkeypatch, asked, machine, settings, why):
    pretend(monkeypatch, **machine)
    config = LearnerConfig(attention=asked, **settings)
    refusal = pytest.raises(UserError, match=f"learner.attention = '{asked}' cannot be used: .*{why}")
    with refusal if why else nullcontext():
        assert choose_attention(config, QWEN3).name == asked


LIGER = [
    ({"packages": ("triton",)}, "qwen3", "the package liger_kernel is not installed"),
    ({"packages": ("liger_kernel",)}, "qwen3", "the package triton is not installed"),
    ({"packages": BOTH, "gpu": False}, "qwen3", "torch sees no GPU"),
    ({"packages": BOTH}, "llama", "Liger has none for models of type qwen3"),
    ({"packages": BOTH}, "qwen3", None),
]


@pytest.fixture
def liger(monkeypatch) -> ModuleType:
    """A stand-in for the module of Liger that replaces layers; `calls` are what it was asked to replace."""
    module: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    module.calls = []
    module._apply_liger_kernel_to_instance = lambda model, **options: module.calls.append((model, options))
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("asked", ["auto", "liger", "torch"])
@pytest.mark.parametrize(("machine", "known", "why"), LIGER)
def test_liger_is_taken_where_it_can_be_and_refused_by_name_where_it_cannot(
    monkeypatch, liger, machine, known, why, asked
):
    pretend(monkeypatch, **machine)
    liger.MODEL_TYPE_TO_APPLY_LIGER_FN = {known: print}
    if asked == "liger" and why:
        with pytest.raises(UserError, match=re.escape(f"learner.kernels = 'liger' cannot be used: {why}")):
            choose_kernels(asked, QWEN3)
        return
    choice = choose_kernels(asked, QWEN3)
    assert choice.name == ("torch" if asked == "torch" or why else "liger")
    assert asked != "auto" or (why or "first choice") in choice.reason


def test_liger_leaves_the_output_layer_alone(liger):
    model: Any = SimpleNamespace(config=QWEN3)
    apply_liger(model)
    assert liger.calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]


SINKS = torch.linspace(-2, 2, 8, dtype=torch.float64)  # of eight heads


def on_threads(size: int, act: Any) -> list[Any]:
    """What `act(group)` returns on each of so many ranks, which are threads."""
    sent: dict[int, torch.Tensor] = {}
    barrier = Barrier(size, timeout=600)

    class Thread(SequenceGroup):
        def exchange(self, parts: torch.Tensor) -> torch.Tensor:
            sent[self.rank] = parts
            barrier.wait()
            received = torch.stack([sent[rank][self.rank] for rank in range(size)])
            barrier.wait()
            return received

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: act(Thread(rank, size, None)), range(size)))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("lengths", [[7, 12, 1, 9], [3]], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"s_aux": SINKS}], ids=["all", "window", "sinks"])
def test_attention_over_slices_is_attention_over_all(size, lengths, options):
    """Also with fewer heads of keys than ranks, fewer tokens than ranks, and values of another width."""
    tokens, attention = sum(lengths), partial(across_ranks, packed_sdpa)
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
def test_a_number_that_does_not_fit_the_heads_is_refused(model, size, fits):
    """The model has 4 heads of queries and 2 of keys."""
    words = f"sequence_parallel = {size} does not fit the model's 4 query heads and 2 key"
    with nullcontext() if fits else pytest.raises(UserError, match=words):
        policy_of(model, weights=False, sequence_parallel=size)


# Rows of two token ids, so that many begin alike, and some are the beginning of another or its equal.
ROWS = st.lists(st.lists(st.integers(299, 300), min_size=1, max_size=6), min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


@given(ROWS)
def test_every_beginning_has_one_place(rows):
    beginnings = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    place_of = dict(zip(beginnings, tree_places(arrays(rows)).tolist(), strict=True))
    assert sorted(place_of.values()) == list(range(len(set(beginnings))))
    assert [place_of[one] for one in beginnings] == tree_places(arrays(rows)).tolist()


@given(ROWS, st.booleans())
def test_packed_rows_are_the_rows(rows, share):
    packed = pack_rows(arrays(rows), share)
    at = slice(None) if packed.places is None else packed.places
    assert packed.tokens[at].tolist() == [token for row in rows for token in row]
    assert packed.positions[at].tolist() == [position for row in rows for position in range(len(row))]


@pytest.mark.parametrize(
    ("rows", "share", "tokens"),
    [
        ([[1, 2, 3], [1, 2, 4]], True, 4),
        ([[1, 2, 3], [1, 2, 4]], False, 6),
        ([[1, 2, 3], [4, 2, 3]], True, 6),
        ([[1, *range(9)], [1, *range(20, 29)]], True, 20),  # one of twenty
        ([[1, 2, 3]], True, 3),
    ],
)
def test_rows_that_share_little_are_packed_end_to_end(rows, share, tokens):
    packed = pack_rows(arrays(rows), share)
    assert (len(packed.tokens), packed.places is None) == (tokens, tokens == sum(map(len, rows)))


def tree() -> tuple[PackedRows, list[int]]:
    """Rows of uneven lengths that share two beginnings, and one that shares none; their lengths."""
    first, second = list(range(12)), list(range(50, 55))
    rows = [[*first, 20, 21], [7, 8, 9], [*first, *range(30, 50)], [*first, *second, 1], [*first, *second, 2, 3]]
    return pack_rows(arrays(rows), True), list(map(len, rows))


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("sdpa", {}),
        ("varlen", {}),
        ("sdpa", {"sliding_window": 4}),
        ("varlen", {"sliding_window": 4}),
        ("sdpa", {"s_aux": torch.ones(4)}),  # sinks
    ],
)
def test_attention_over_a_tree_is_attention_over_its_branches(kernel, options):
    packed, lengths = tree()
    assert packed.places is not None
    at = torch.from_numpy(packed.places)
    ways = []
    for is_tree in (True, False):
        tensors = tensors_of(len(packed.tokens))
        if is_tree:
            sequences = pack_sequences(lengths, places=packed.places)
            output = attend(PACKED[kernel], tensors, sequences, **options)[:, at]
        else:
            branches = [tensor[:, :, at] for tensor in tensors]
            output = attend(PACKED[kernel], branches, pack_sequences(lengths), **options)
        ways.append(with_gradients(output, tensors))
    torch.testing.assert_close(*ways)


def test_gradients_of_a_token_of_many_rows_are_added_up_exactly():
    """In bfloat16 a sum of ones stays at 256."""
    rows = [np.array([1, 2 + i], np.int32) for i in range(1000)]
    packed = pack_rows(rows, True)
    tensors = [torch.ones(1, 1, len(packed.tokens), 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    output = attend(packed_sdpa, tensors, pack_sequences([2] * len(rows), places=packed.places))
    output[:, 1:].sum().backward()  # of each row's own token, which reads both with half the weight
    assert tensors[2].grad is not None
    assert tensors[2].grad[0, 0, 0].tolist() == [500.0] * 8


def test_flash_attention_names_what_reads_shared_prefixes():
    packed, lengths = tree()
    with pytest.raises(UserError, match=r"set learner\.attention to varlen or sdpa"):
        pack_sequences(lengths, places=packed.places).flash_arguments()
