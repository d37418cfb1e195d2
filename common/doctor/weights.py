"""The weight socket: its keys, and the port it is to be served on."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.doctor.case import Case
from common.doctor.finding import Finding, ok, problem
from common.errors import UserError
from common.role import Role

# Whose pair a role has as its own, and whom it must know.
OWN = {Role.LEARNER: ("server", "client"), Role.GENERATOR: ("client", "server"), Role.RELAY: ("client", "server")}


def keys(case: Case, config: Config) -> Finding | None:
    """Whether the CURVE keys this role needs are there and well-formed."""
    folder = config.learner.weights.curve_dir
    if case.role not in OWN or folder is None:
        return None
    # Needs pyzmq, which not every role has.
    from common.curve import key_pair, public_key

    own, other = OWN[case.role]
    try:
        key_pair(folder, own)
        public_key(folder, other)
    except UserError as error:
        return problem("keys", str(error))
    return ok("keys", f"{Path(folder) / own}.key_secret and {other}.key")


def port(case: Case, config: Config) -> Finding | None:
    """Whether the learner can serve weights where it is told to."""
    weights, name = config.learner.weights, "weights port"
    # Of several ranks the first serves.
    if case.role is not Role.LEARNER or case.machine.environ.get("RANK", "0") != "0":
        return None
    if weights.bind.endswith(":*"):
        return ok(name, f"{weights.bind}: any free one")
    from common.weights.listener import check_address

    try:
        check_address(weights.bind)
    except UserError as error:
        return problem(name, str(error))
    return ok(name, f"{weights.bind} is free")
