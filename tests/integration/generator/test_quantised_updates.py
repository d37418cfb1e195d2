"""A model that vLLM quantises as it loads it is updated like any other, and what an update lacks is named.

vLLM quantises by channel in plain torch, and refuses CPUs only because they cannot compute with the result. Nothing is
computed here. The test runs this file as a program, since vLLM's changes would stay in the tests' process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

LAYER = "model.layers.1"
LEFT_OUT = [None, f"{LAYER}.self_attn.k_proj.weight", f"{LAYER}.input_layernorm.weight"]


def load(config: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    config.compilation_config.static_forward_context.clear()  # of the model before
    return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)


def update(config: Any, model: Any, weights: dict[str, torch.Tensor]) -> str:
    """The error of an update to these weights, or nothing."""
    from generator.weights.weight_engine import SharedMemoryWeightEngine

    engine = SharedMemoryWeightEngine(SimpleNamespace(backend="spo"), config, torch.device("cpu"), model)  # type: ignore[arg-type]
    engine.start_weight_update()
    try:
        engine.load(iter(weights.items()), weights.keys())
    except ValueError as error:
        return str(error)
    engine.finish_weight_update()
    return ""


def distance(model: Any, weights: dict[str, torch.Tensor]) -> float:
    """Largest difference between a quantised layer and the weights it is of, in parts of a channel's largest weight."""
    layer = model.model.layers[1].self_attn.qkv_proj
    whole = torch.cat([weights[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qkv"]).float()
    unpacked = (layer.weight.float() * layer.weight_scale.view(1, -1)).T
    return float(((unpacked - whole).abs() / whole.abs().amax(1, keepdim=True)).max())


def main(folder: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from tests.support.engine import save_tiny_model, tiny_model

    type(current_platform).supported_quantization = []  # of none, it checks none
    torch.accelerator.empty_cache = lambda: None  # type: ignore[method-assign]
    save_tiny_model(folder / "model", seed=0)
    weights = {name: tensor.detach().bfloat16() for name, tensor in tiny_model(1).named_parameters()}
    config = EngineArgs(
        model=str(folder / "model"), dtype="bfloat16", quantization="fp8_per_channel", enforce_eager=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        errors = {}
        for name in LEFT_OUT:
            model = load(config)
            before = distance(model, weights)
            errors[str(name)] = update(config, model, {key: value for key, value in weights.items() if key != name})
            if name is None:
                kind = str(model.model.layers[1].self_attn.qkv_proj.weight.dtype)
                measures = {"before": before, "after": distance(model, weights), "dtype": kind}
    print(json.dumps(measures | {"errors": errors}))


def test_a_quantised_model_is_updated_or_what_lacks_is_named(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, __file__, str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    measures = json.loads(ran.stdout.splitlines()[-1])
    assert measures["dtype"] == "torch.float8_e4m3fn"
    step = 1 / 16  # of fp8 with three bits behind the point: half a step is at most 1/16 of the number
    assert measures["after"] <= step < measures["before"]
    complete, *incomplete = measures["errors"].items()
    assert complete == ("None", "")
    for name, error in incomplete:
        assert error == f"the update lacks 1 weights of the model, among them {name}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
