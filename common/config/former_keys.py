"""Keys that the configuration no longer has: those of earlier releases are still read, with a warning.

A key whose value can be kept is moved to its new place. Any other key is accepted at its former default, which is what
holds today, and refused at another value. `former_names.py` has the former names of verl and SkyRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
CLIPPED = ("ppo_clip", "gspo", "cispo", "clip_cov")


@dataclass(frozen=True, slots=True)
class Gone:
    """A key that nothing took the place of.

    Attributes:
        default: the value it had where none was given.
        today: what holds instead.
    """

    default: Any
    today: str


@dataclass(frozen=True, slots=True)
class LossKey:
    """A key of `algorithm` that is an option of some losses now.

    Attributes:
        default: the value it had where none was given.
        option: its name in `algorithm.loss_options`.
        losses: those that have it.
    """

    default: float
    option: str
    losses: tuple[str, ...]


# By the section's class.
GONE: dict[str, dict[str, Gone]] = {
    "GeneratorConfig": {
        "top_p": Gone(1.0, "training responses are sampled from the whole distribution (evaluations have eval.top_p)"),
        "top_k": Gone(0, "training responses are sampled from the whole distribution (evaluations have eval.top_k)"),
    },
    "WeightsConfig": {
        "chunk_mib": Gone(8, "a chunk has 8 MiB"),
        "credit": Gone(8, "8 chunks are asked for ahead"),
    },
    "BrokerConfig": {"heartbeat": Gone(1.0, "it follows from broker.dead_after: a tenth of it, and at most 1 s")},
}
LOSS_KEYS = {
    "clip_low": LossKey(0.2, "low", CLIPPED),
    "clip_high": LossKey(0.28, "high", CLIPPED),
    "clip_dual": LossKey(10.0, "cap", ("ppo_clip",)),
    "tau_pos": LossKey(1.0, "tau_pos", ("sapo",)),
    "tau_neg": LossKey(1.05, "tau_neg", ("sapo",)),
    "band_low": LossKey(0.5, "low", ("double_sided",)),
    "band_high": LossKey(5.0, "high", ("double_sided",)),
}


def without_gone(section: str, data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The fields of a section without the keys that it no longer has, and a line about them if there are any.

    Raises:
        ValueError: one has another value than its former default.
    """
    gone, fields = GONE.get(section, {}), dict(data)
    former = {name: fields.pop(name) for name in data if name in gone}
    for name, value in former.items():
        if value != gone[name].default:
            raise ValueError(f"{name} = {value!r} is no key any more: {gone[name].today}; remove it")
    return fields, idle(former)


def loss_keys(data: Mapping[str, Any], loss: str, is_built_in: bool) -> tuple[Fields, list[str]]:
    """The fields of `algorithm` with former keys of the loss among its `loss_options`, and a line for each.

    Raises:
        ValueError: an option is given too, or the loss is the user's own, which knows its options itself.
    """
    fields, notes, unchanged = dict(data), list[str](), Fields()
    for name, key in LOSS_KEYS.items():
        if name not in fields:
            continue
        value = fields.pop(name)
        options = fields.get("loss_options") or {}
        if value == key.default:
            unchanged[name] = value
        elif not is_built_in:
            raise ValueError(f"{name} = {value!r} is no key any more: make it an option of {loss!r}, in loss_options")
        elif loss not in key.losses:
            notes.append(f"{name} = {value!r} has no effect on loss {loss!r}, and is no key any more; remove it")
        elif options.get(key.option, value) != value:
            raise ValueError(
                f"{name} = {value!r} is an older name for loss_options.{key.option} (given: {options[key.option]!r}); "
                f"give loss_options.{key.option} alone"
            )
        else:
            fields["loss_options"] = {**options, key.option: value}
            notes.append(f"{name} = {value!r} is an older name; say loss_options={{{key.option}: {value!r}}}")
    return fields, notes + idle(unchanged)


def idle(former: Mapping[str, Any]) -> list[str]:
    """A line about former keys with values that hold today anyway; none if there are none."""
    if not former:
        return []
    keys = " and ".join(f"{name} = {value!r}" for name, value in former.items())
    are = "are no keys" if len(former) > 1 else "is no key"
    return [f"{keys} {are} any more, and the default; remove {'them' if len(former) > 1 else 'it'}"]
