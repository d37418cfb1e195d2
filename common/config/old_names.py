"""Names that fields of the correction had in earlier versions of verl and SkyRL: read, with a warning.

Given together with the new name of the same thing, an old one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# SkyRL's names from before its block, fields of `trainer.algorithm` themselves.
BESIDE_BLOCK = ("use_tis", "tis_imp_ratio_cap")


def translate(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a correction under today's names, and a line for each old name.

    Raises:
        ValueError: an old name stands beside the new one, or has a value that means nothing today.
    """
    fields, notes = dict(data), list[str]()

    def replace(old: str, new: Mapping[str, Any]) -> None:
        """Put `new` in the place of `old`, which nothing else may have set."""
        for name in new:
            if name in data:
                raise ValueError(
                    f"{old} = {data[old]!r} is an older name for {name} (given: {data[name]!r}); give {name} alone"
                )
        fields.pop(old)
        fields.update(new)
        today = ", ".join(f"{name}={value!r}" for name, value in new.items()) or "nothing"
        notes.append(f"{old} = {data[old]!r} is an older name; say {today}")

    if isinstance(data.get("rollout_is"), bool):
        _replace_switch(data, fields, notes)
    elif "rollout_is_level" in data:
        replace("rollout_is_level", {"rollout_is": _level(data["rollout_is_level"])})
    if "rollout_rs_threshold_lower" in data:
        _replace_lower_bound(data, fields, notes)
    if "use_pure_rollout_correction" in data:
        pure = bool(data["use_pure_rollout_correction"])
        replace("use_pure_rollout_correction", {"bypass_mode": True, "loss_type": "reinforce"} if pure else {})
    if "bypass_old_logprob_for_rollout" in data:
        replace("bypass_old_logprob_for_rollout", {"bypass_mode": data["bypass_old_logprob_for_rollout"]})
    if any(name in data for name in BESIDE_BLOCK):
        _replace_tis(data, fields, notes)
    return fields, notes


def _level(level: Any) -> Any:
    if level == "geometric":
        raise ValueError(
            "rollout_is_level = 'geometric' is no level of weights today; allowed: token, sequence, or "
            "rollout_rs=seq_mean_k1 to reject by the geometric mean"
        )
    return level


def _replace_switch(data: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    """`rollout_is: true` with `rollout_is_level`; by token where no level is given."""
    level = _level(fields.pop("rollout_is_level", "token"))
    fields["rollout_is"] = level if data["rollout_is"] else None
    names = "rollout_is = true or false" + (" with rollout_is_level" if "rollout_is_level" in data else "")
    notes.append(f"{names} is an older spelling; say rollout_is={fields['rollout_is']!r}")


def _replace_lower_bound(data: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    """`rollout_rs_threshold_lower` beside an upper `rollout_rs_threshold`."""
    lower, upper = fields.pop("rollout_rs_threshold_lower"), data.get("rollout_rs_threshold")
    if lower is None:
        return
    if upper is None or "_" in str(upper) or "," in str(upper):
        raise ValueError(
            f"rollout_rs_threshold_lower = {lower!r} is an older name for the lower end of rollout_rs_threshold "
            f"(given: {upper!r}); give rollout_rs_threshold alone, as lower_upper"
        )
    fields["rollout_rs_threshold"] = f"{lower}_{upper}"
    notes.append(
        f"rollout_rs_threshold_lower = {lower!r} is an older name; say "
        f"rollout_rs_threshold={fields['rollout_rs_threshold']!r}"
    )


def _replace_tis(data: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    """SkyRL's `use_tis` and `tis_imp_ratio_cap`: weights by token."""
    named = [name for name in BESIDE_BLOCK if name in data]
    if data.get("skyrl") is not None:
        raise ValueError(
            f"{' and '.join(named)}: older names for fields of skyrl, which is given too; give skyrl alone"
        )
    use, cap = fields.pop("use_tis", True), fields.pop("tis_imp_ratio_cap", None)
    block: dict[str, Any] = {"tis_ratio_type": "token"} if use else {}
    if use and cap is not None and cap > 0:
        block["token_tis_ratio_clip_high"] = cap
    fields["skyrl"] = block
    today = ", ".join(f"skyrl.{name}={value!r}" for name, value in block.items()) or "skyrl={}"
    notes.append(f"{' and '.join(named)}: older names; say {today}")
