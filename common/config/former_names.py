"""Names of presets and fields of the off-policy correction in former releases of verl and SkyRL.

They are read with a warning, and refused beside today's name for the same thing. Former keys of SPO itself are in
`former_keys.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS = {
    "token_is": "decoupled_token_is",
    "token_tis": "decoupled_token_is",
    "seq_is": "decoupled_seq_is",
    "seq_is_rs": "decoupled_seq_is_rs",
    "seq_mis": "decoupled_seq_is_rs",
    "geo_rs": "decoupled_geo_rs",
    "geo_mis": "decoupled_geo_rs",
    "ppo_is_bypass": "bypass_ppo_clip",
    "pg_is": "bypass_pg_is",
    "pure_is": "bypass_pg_is",
    "pg_rs": "bypass_pg_geo_rs",
    "bypass_pg_rs": "bypass_pg_geo_rs",
    "geo_rs_seq_tis": "decoupled_geo_rs_seq_tis",
    "pg_geo_rs_seq_tis": "bypass_pg_geo_rs_seq_tis",
    "sao": "sao_mask",
}
# SkyRL's names from before it had the block; they were fields of `trainer.algorithm`.
BESIDE_BLOCK = ("use_tis", "tis_imp_ratio_cap")
# verl's names in the correction for `algorithm.proximal: rollout` and for `algorithm.loss`, and their values.
OF_ALGORITHM: dict[str, tuple[Any, ...]] = {"bypass_mode": (True, False), "loss_type": ("ppo_clip", "reinforce")}

Fields = dict[str, Any]


def translate(data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The fields of a correction under today's names, and those of `OF_ALGORITHM`; a line for each former name.

    Raises:
        ValueError: a former name is given beside today's, or has a value without a meaning today.
    """
    fields, notes = dict(data), _of_algorithm(data)
    for read in (_off, _mode, _level, _band, _veto, _pure, _gradient, _bypass, _tis):
        before = dict(fields)
        today = read(fields)
        former = " and ".join(f"{name} = {value!r}" for name, value in before.items() if name not in fields)
        for name in today.keys() & fields.keys():
            raise ValueError(f"{former} is an older name for {name} (given: {fields[name]!r}); give {name} alone")
        if former:
            fields |= today
            say = ", ".join(f"{name}={value!r}" for name, value in today.items())
            notes.append(f"{former} is an older name; {f'say {say}' if say else 'remove it'}")
    return fields, notes


def _of_algorithm(fields: Mapping[str, Any]) -> list[str]:
    for name, allowed in OF_ALGORITHM.items():
        if name in fields and not any(fields[name] == value and type(fields[name]) is type(value) for value in allowed):
            raise ValueError(f"{name} = {fields[name]!r}; allowed: {', '.join(map(repr, allowed))}")
    given = [f"{name} = {fields[name]!r}" for name in OF_ALGORITHM if name in fields]
    if not given:
        return []
    return [f"{' and '.join(given)}: older names; say algorithm.proximal and algorithm.loss instead"]


# Each of these takes former names out of the fields, and returns the fields that replace them.


def _off(fields: Fields) -> Fields:
    """`rollout_is_threshold: null`, with which verl computed no weights, whatever `rollout_is` said."""
    if "rollout_is_threshold" not in fields or fields["rollout_is_threshold"] is not None:
        return {}
    for name in ("rollout_is", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower"):
        fields.pop(name, None)
    del fields["rollout_is_threshold"]
    return {"rollout_is": None}


def _level(fields: Fields) -> Fields:
    """`rollout_is: true` with `rollout_is_level`; by token if no level is given."""
    is_switch = isinstance(fields.get("rollout_is"), bool)
    if not is_switch and "rollout_is_level" not in fields:
        return {}
    level = fields.pop("rollout_is_level", "token")
    if level == "geometric":
        raise ValueError(
            "rollout_is_level = 'geometric' is not a level of weights today; allowed: token, sequence, or "
            "rollout_rs=seq_mean_k1 to reject by the geometric mean"
        )
    return {"rollout_is": None if is_switch and not fields.pop("rollout_is") else level}


def _band(fields: Fields) -> Fields:
    """`rollout_rs_threshold_lower` beside an upper `rollout_rs_threshold`."""
    if (lower := fields.pop("rollout_rs_threshold_lower", None)) is None:
        return {}
    upper = fields.pop("rollout_rs_threshold", None)
    if upper is None or "_" in str(upper) or "," in str(upper):
        raise ValueError(
            f"rollout_rs_threshold_lower = {lower!r} is an older name for the lower end of rollout_rs_threshold "
            f"(given: {upper!r}); give rollout_rs_threshold alone, as lower_upper"
        )
    return {"rollout_rs_threshold": f"{lower}_{upper}"}


def _mode(fields: Fields) -> Fields:
    """`rollout_is_mode`: weights truncated, or nothing outside a band that begins at `rollout_is_threshold_lower`."""
    if "rollout_is_mode" not in fields and "rollout_is_threshold_lower" not in fields:
        return {}
    mode, lower = fields.pop("rollout_is_mode", "truncate"), fields.pop("rollout_is_threshold_lower", None)
    if mode == "truncate":
        return {}  # the lower end was only reported
    upper = fields.get("rollout_is_threshold", 2.0)
    if mode not in ("mask", "clip") or isinstance(upper, bool) or not isinstance(upper, int | float) or upper <= 0:
        raise ValueError(
            f"rollout_is_mode = {mode!r} with rollout_is_threshold = {upper!r}: this older name allowed truncate, mask "
            "and clip, with a number above 0"
        )
    band = f"{1 / upper if lower is None else lower}_{upper}"
    if mode == "clip":
        fields.pop("rollout_is_threshold", None)
        return {"rollout_is_threshold": band}
    level = fields.get("rollout_is_level", fields.get("rollout_is"))
    rule = {"sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}.get(str(level), "token_k1")
    return {"rollout_rs": rule, "rollout_rs_threshold": band}


def _veto(fields: Fields) -> Fields:
    name = "rollout_is_veto_threshold"
    return {"rollout_token_veto_threshold": fields.pop(name)} if name in fields else {}


def _pure(fields: Fields) -> Fields:
    return {"bypass_mode": True, "loss_type": "reinforce"} if fields.pop("use_pure_rollout_correction", False) else {}


def _gradient(fields: Fields) -> Fields:
    return {"loss_type": "reinforce"} if fields.pop("use_policy_gradient", False) else {}


def _bypass(fields: Fields) -> Fields:
    name = "bypass_old_logprob_for_rollout"
    return {"bypass_mode": fields.pop(name)} if name in fields else {}


def _tis(fields: Fields) -> Fields:
    """SkyRL's `use_tis` and `tis_imp_ratio_cap`: weights by token."""
    if not any(name in fields for name in BESIDE_BLOCK):
        return {}
    cap = fields.pop("tis_imp_ratio_cap", None)
    if not fields.pop("use_tis", True):
        return {"skyrl": {}}
    has_cap = cap is not None and not (isinstance(cap, int | float) and cap <= 0)
    return {"skyrl": {"tis_ratio_type": "token"} | ({"token_tis_ratio_clip_high": cap} if has_cap else {})}
