"""The weight socket: its CURVE keys and its port."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.errors import UserError
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.process import Role

# Names of the key pair a role owns, and of the pair whose public key it needs.
KEYS = {Role.LEARNER: ("server", "client"), Role.GENERATOR: ("client", "server"), Role.RELAY: ("client", "server")}


def keys(context: Context, config: Config) -> Finding | None:
    """Whether the CURVE keys this role needs exist and are well-formed."""
    folder = config.learner.weights.curve_dir
    if context.role not in KEYS or folder is None:
        return None
    # Imports pyzmq, which not every role has.
    from common.curve import key_pair, public_key

    own, other = KEYS[context.role]
    try:
        key_pair(folder, own)
        public_key(folder, other)
    except UserError as error:
        return problem("keys", str(error))
    return ok("keys", f"{Path(folder) / own}.key_secret and {other}.key")


def port(context: Context, config: Config) -> Finding | None:
    """Whether the learner can bind the address it is to serve weights on."""
    weights, name = config.learner.weights, "weights port"
    # Of several ranks, rank 0 serves the weights.
    if context.role is not Role.LEARNER or context.machine.environ.get("RANK", "0") != "0":
        return None
    if weights.bind.endswith(":*"):
        return ok(name, f"{weights.bind}: any free port")
    from common.weights.listener import check_address

    try:
        check_address(weights.bind)
    except UserError as error:
        return problem(name, str(error))
    return ok(name, f"{weights.bind} is free")
