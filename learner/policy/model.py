"""The policy: a `transformers` causal language model that answers with log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.errors import UserError, first_line
from common.log import get_logger
from common.model import check_model_folder, download_failure
from common.model_files import HEAD, lacks, listed
from learner.policy.attention import PACKED_SDPA, PACKED_VARLEN, PackedSequences
from learner.policy.checkpointing import recompute_layers
from learner.policy.disk_names import rename_as_stored
from learner.policy.kernels import IMPLEMENTATIONS, Choice, apply_liger, choose_attention, choose_kernels
from learner.policy.language_part import language_part
from learner.policy.logprobs import LogitTransform, LogprobHead, chunk_of
from learner.policy.lora import adapter_weights, add_adapter
from learner.policy.packing import Packing, check_division
from learner.policy.routers import Routers, Routing, check_routers
from learner.ranks.ulysses import SequenceGroup

# Tokens by which vLLM's sliding window is longer than transformers', by model type. vLLM's is the window that these
# models were trained with, as its own source says (vllm/model_executor/models/commandr.py).
LONGER_WINDOWS = {"cohere2": 1, "cohere2_moe": 1}


class Policy(nn.Module):
    """Wraps the model so that one forward goes from packed tokens to log-probs of the predicted ones.

    Attributes:
        group: ranks that divide the packed tokens; all call `forward` together, with the same arguments.
        choices: the implementations of its `attention` and its other layers (`kernels`), if `load_policy` made it.
    """

    group: SequenceGroup | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        chunk: int,
        temperature: float,
        *,
        has_adapter: bool = False,
        float32_head: bool = True,
        choices: Mapping[str, Choice] = {},
    ) -> None:
        super().__init__()
        self.model = model
        self.packing = Packing(model)
        self.routers = Routers.of(model)
        self.has_adapter = has_adapter
        self.choices = choices
        transform = LogitTransform.of(model.config.get_text_config())
        LogprobHead.adopt(model.get_output_embeddings(), chunk, temperature, float32_head, transform)

    @property
    def vocabulary(self) -> int:
        """Token ids the model has embeddings for."""
        return int(self.model.config.get_text_config().vocab_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        sequences: PackedSequences,
        predict: torch.Tensor,
        targets: torch.Tensor,
        entropy: bool = False,
        temperature: float | None = None,
        routing: Routing | None = None,
        others: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-probs and entropies of `targets` [N], each predicted at a packed position; float32 [N] both.

        Args:
            input_ids, position_ids: packed tokens [1, T].
            sequences: where the packed sequences begin and end.
            predict: positions [N] whose next tokens are the targets.
            temperature: by default the temperature of training responses.
            routing: the experts to replay, if any, and a record of what the routers of a mixture did.
            others: K more ids at each position, int64 [N, K]; their log-probs, float32 [N, K], become a third result.
        """
        counts: list[int] = []
        own_routing = routing
        if self.group is not None:
            if routing is not None:
                own_routing = routing.divided(self.group, input_ids.shape[1])
            input_ids, position_ids, sequences, predict, targets, counts = own_slice(
                self.group, input_ids, position_ids, sequences, predict, targets
            )
            others = None if others is None else others.split(counts)[self.group.rank]
        routed = {} if own_routing is None else {"routing": own_routing}
        hidden_1TH = read_packed(self.model, input_ids, position_ids, sequences, **routed).last_hidden_state
        head = self.model.get_output_embeddings()
        results = head(hidden_1TH[0].index_select(0, predict), targets, entropy, temperature, others)
        if self.group is None:
            return tuple(results)
        if routing is not None and own_routing is not None:
            routing.join(self.group, own_routing)
        # Tokens are the first dimension; the gathered tensors are joined along the last.
        return tuple(
            self.group.join(own.T, counts).T if own.ndim > 1 else self.group.join(own, counts) for own in results
        )

    def states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, sequences: PackedSequences, at: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of the middle and of the last layer at the packed positions `at` [N], float32 [N, 2H]."""
        layers = read_packed(self.model, input_ids, position_ids, sequences, output_hidden_states=True).hidden_states
        return torch.cat([layers[len(layers) // 2][0, at], layers[-1][0, at]], 1).float()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that training changes: all by the model's names, tied ones once; or the adapter's alone."""
        yield from adapter_weights(self.model) if self.has_adapter else self.model.named_parameters()


def read_packed(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    sequences: PackedSequences,
    **arguments: Any,
) -> Any:
    """The output of a model without its head for packed tokens [1, T]; further arguments go to the model."""
    packing: Any = model.packing
    packing.sequences = sequences
    if model.config._attn_implementation not in (PACKED_SDPA, PACKED_VARLEN):
        arguments |= sequences.flash_arguments()
    return body_of(model)(input_ids=input_ids, position_ids=position_ids, use_cache=False, **arguments)


def body_of(model: PreTrainedModel) -> Any:
    """A model without its head."""
    if model.base_model is not model:
        return model.base_model
    # Llama 4 looks for its body under the name that it has in multimodal models.
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    return model.get_submodule(name.rpartition(".")[0])


def own_slice(
    group: SequenceGroup,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    sequences: PackedSequences,
    predict: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, PackedSequences, torch.Tensor, torch.Tensor, list[int]]:
    """The arguments of `Policy.forward` for this rank's slice of the packed tokens.

    Padding tokens, which form a sequence of their own, make T a multiple of the group's size.

    Args:
        predict: ascending positions.

    Returns:
        The arguments in their order, for the slice [1, T / group.size]: `predict` counts from the slice's start and may
        be empty. Then the number of targets of each rank.
    """
    length = -(-input_ids.shape[1] // group.size)
    padding = length * group.size - input_ids.shape[1]
    start = group.rank * length
    ids, positions = (F.pad(tensor, (0, padding))[:, start : start + length] for tensor in (input_ids, position_ids))
    counts, mine = group.among_slices(predict, length)
    return ids, positions, sequences.divided(group, padding), predict[mine] - start, targets[mine], counts


def load_policy(config: Config, weights: bool = True, key: str = "model.path") -> Policy:
    """Load the model at `model.path`, for training.

    Args:
        key: the setting that names it, for messages.
        weights: if false, the model has its shape, its buffers, and no weights: parameters are on torch's device
            `meta` and take no memory.

    Raises:
        UserError: it cannot be read, or has a part that the learner would not compute as vLLM does.
    """
    path = config.model.path
    model, choices, missing = load_model(config, AutoModelForCausalLM, path, key, weights)
    if missing:
        raise UserError(f"{key} = {path!r}: {lacks(missing)}")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise UserError(f"{key} = {path!r}: {type(model).__name__} has no linear output layer")
    _check_tied(model, path, key)
    lora = config.learner.lora
    if lora is not None:
        add_adapter(model, lora, path, config.run.seed)
    gpu_bytes = int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0
    policy = Policy(
        model.train(),
        chunk_of(model.config.get_text_config().vocab_size, gpu_bytes),
        config.generator.temperature,
        has_adapter=lora is not None,
        float32_head=config.model.head_dtype == "float32",
        choices=choices,
    )
    check_routers(policy.routers, config.learner, path, type(model).__name__)
    check_division(policy.packing, config.learner, key, path)
    if policy.packing.indexers:
        get_logger().info(
            "indexers are not trained: choosing tokens has no gradient",
            layers=listed(policy.packing.indexers),
            index_topk=getattr(model.config, "index_topk", None),
            max_model_len=config.model.max_model_len,
        )
    return policy


def load_model(
    config: Config, kind: Any, path: str, key: str, weights: bool = True
) -> tuple[PreTrainedModel, dict[str, Choice], list[str]]:
    """Load a model for training, with the learner's attention and kernels; arguments and errors as in `load_policy`.

    Args:
        kind: `transformers`' class for models with its head, such as `AutoModelForCausalLM`.

    Returns:
        The model, the choices of its attention and kernels, and the names of parameters that the folder does not have.
    """
    check_model_folder(path, weights, key=key)
    disable_progress_bar()
    trust, missing = config.model.trust_remote_code, list[str]()
    dtype = getattr(torch, config.learner.dtype)
    try:
        part = language_part(AutoConfig.from_pretrained(path, trust_remote_code=trust), path, key)
        model_config = part.config
        if kind is AutoModelForTokenClassification:
            _become_scalar(model_config, path, key)
        if config.learner.sequence_parallel > 1:
            _check_heads(model_config, config.learner.sequence_parallel)
        _without_noise(model_config)
        with_engine_window(model_config)
        attention = choose_attention(config.learner, model_config)
        layers = choose_kernels(config.learner.kernels, model_config)
        implementation = IMPLEMENTATIONS[attention.name]
        options = {"dtype": dtype, "attn_implementation": implementation, "trust_remote_code": trust}
        if weights:
            # `_check_loaded` refuses weights of another shape, and names them.
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True, "key_mapping": dict(part.renamed)}
            model, loading = kind.from_pretrained(path, config=model_config, **options)
            missing = sorted(loading["missing_keys"])
            _check_loaded(model, loading, part.others, path, key)
        else:
            with init_empty_weights():
                model = kind.from_config(model_config, **options)
            model.tie_weights()
            rename_as_stored(model, dict(part.renamed))
    except UserError:
        raise
    except Exception as error:
        failure = download_failure(path, error)
        if failure:
            raise UserError(failure) from error
        raise UserError(f"{key} = {path!r} cannot be loaded: {first_line(error)}") from error
    model.is_part = bool(part.others)
    if model.is_part and weights:
        get_logger().info(
            "the language part of the model is trained; exports have the other parts unchanged",
            model=path,
            trained=type(model).__name__,
        )
    if layers.name == "liger":
        apply_liger(model)
    recompute_layers(model, config.learner.gradient_checkpointing)
    return model, {"attention": attention, "kernels": layers}, missing


def _check_loaded(model: PreTrainedModel, loading: dict[str, Any], others: frozenset[str], path: str, key: str) -> None:
    """Refuse weights of another shape than the model's; warn of unused ones, except `others`, of its other parts."""
    if mismatched := sorted(loading["mismatched_keys"]):
        shapes = [f"{name} ({_shape(there)}, not {_shape(here)})" for name, there, here in mismatched]
        raise UserError(
            f"{key} = {path!r}: its weights have other shapes than its config.json says: {listed(shapes)}; take both "
            "from one model"
        )
    # A critic reads all of a policy but its output layer.
    unused = sorted(name for name in loading["unexpected_keys"] - others if HEAD not in name.split("."))
    if unused:
        get_logger().warning(
            "weights of the model are not used; exports have them unchanged", model=path, weights=listed(unused),
            reason=f"{type(model).__name__} with this config.json has no place for them",
        )  # fmt: skip


def _shape(size: Any) -> str:
    return "×".join(map(str, size))


def _check_tied(model: PreTrainedModel, path: str, key: str) -> None:
    """Refuse files with a separate output layer if config.json ties it to the embeddings: vLLM would not read it."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if getattr(model.config, "tie_word_embeddings", False) and head is not embedding:
        raise UserError(
            f"{key} = {path!r}: the file has an output layer of its own ({HEAD}.weight), and the configuration ties it "
            "to the embeddings; set tie_word_embeddings to false in its config.json, or remove it from the file"
        )


def _become_scalar(config: PreTrainedConfig, path: str, key: str) -> None:
    """Configure a model to compute one number per token; refuse a type that transformers has no such class for."""
    remote = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING and "AutoModelForTokenClassification" not in remote:
        raise UserError(
            f"{key} = {path!r} cannot be a critic: transformers has no model of type {config.model_type!r} that gives "
            "each token a number (ForTokenClassification); set algorithm.baseline=tracker, or critic.model to a model "
            "with the same tokenizer that has one"
        )
    config.num_labels = 1


def _check_heads(config: PreTrainedConfig, ranks: int) -> None:
    text = config.get_text_config()
    heads = text.num_attention_heads
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or (of_keys % ranks and ranks % of_keys):
        raise UserError(
            f"learner.sequence_parallel = {ranks} does not fit the model's {heads} query heads and {of_keys} key "
            "heads: it must divide the first number, and divide the second or be a multiple of it"
        )


def _without_noise(config: PreTrainedConfig) -> None:
    """Switch dropout and routers' noise off: the policy that is trained must be the one that generates."""
    text: Any = config.get_text_config()
    for name, value in vars(text).items():
        if ("dropout" in name or "jitter" in name or name.endswith("_pdrop")) and isinstance(value, float):
            setattr(text, name, 0.0)


def with_engine_window(config: PreTrainedConfig) -> None:
    """Give a sliding window the length that it has in vLLM; exports keep the source's config.json."""
    text: Any = config.get_text_config()
    if text.model_type in LONGER_WINDOWS:
        text.sliding_window += LONGER_WINDOWS[text.model_type]
