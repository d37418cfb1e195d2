"""A device other than the CPU, for tests without one: it computes on the CPU, and mixes tensors as a GPU does.

Torch's device `meta` stands for it within `other_device`. Its tensors may meet tensors of the CPU only where a GPU
would allow that: in a copy, and where the CPU's tensor is a plain number. Elsewhere torch's error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
_tensor = torch.tensor


class There(torch.Tensor):
    """A tensor on the other device; `here` holds its values."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> There:
        with _disable_current_modes():
            shown = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device=DEVICE)
        made = torch.Tensor._make_subclass(cls, shown)
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes tensors on the other device if they are asked for there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_there = any(isinstance(value, There) for value in tree_leaves((args, kwargs)))
        return _call(func, args, kwargs) if is_there or _names(kwargs, DEVICE) else func(*args, **kwargs)


@contextmanager
def other_device() -> Iterator[None]:
    """The other device exists within the block."""
    with _Mode(), patch.object(torch, "tensor", _made_there):
        yield


def move(module: nn.Module) -> None:
    """Put a module's parameters and buffers onto the other device."""
    moved: dict[nn.Parameter, nn.Parameter] = {}  # tied ones once
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved.setdefault(parameter, nn.Parameter(There(parameter.data.clone())))
                part._parameters[name] = moved[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = There(buffer.clone())


def _made_there(data: Any, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which on `meta` would make one without values."""
    is_there = device is not None and torch.device(device) == DEVICE
    made = _tensor(data, device=None if is_there else device, **options)
    return There(made) if is_there else made


def _names(kwargs: dict[str, Any], device: torch.device) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]) == device


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator, computed on the CPU after the check of devices."""
    operator, tensors = func.overloadpacket, [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    stays_behind = any(tensor.dim() and not isinstance(tensor, There) for tensor in tensors)
    if there and stays_behind and operator not in COPIES:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    is_result_there = _names(kwargs, DEVICE) if kwargs.get("device") is not None else bool(there)
    result = func(*_to_here(args), **_to_here(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))
    if operator is torch.ops.aten.copy_:
        return args[0]
    originals = {id(tensor.here): tensor for tensor in there}  # a tensor changed in place stays the same object

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return originals[id(value)] if id(value) in originals else There(value)

    return tree_map(wrapped, result) if is_result_there else result


def _to_here(values: Any) -> Any:
    return tree_map(lambda value: value.here if isinstance(value, There) else value, values)
