"""A generator's weight client alone: pulls once, as the configuration says, and prints what came as JSON.

The argument is a configuration file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
from pathlib import Path

from common.config import load_config
from common.errors import reports_user_errors
from common.log import get_logger
from common.streams.broker import connect
from generator.weights.weight_client import WeightClient

WIDTH = {"float32": 4, "bfloat16": 2}  # bytes


async def pull(path: str) -> None:
    """Print the version and each tensor's SHA-256.

    Raises:
        UserError: as `WeightClient`.
    """
    config = load_config(path)
    broker = connect(config.broker, config.run.name)
    client = WeightClient(lambda: broker.endpoint("weights"), config.learner.weights, log=get_logger())
    try:
        with await asyncio.wait_for(client.next(), 30) as weights:
            manifest, data = weights.manifest, Path(weights.path).read_bytes()
            columns = zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets, strict=True)
            found = {
                name: hashlib.sha256(data[at : at + math.prod(shape) * WIDTH[dtype]]).hexdigest()
                for name, dtype, shape, at in columns
            }
            print(json.dumps({"version": manifest.version, "sha256": found}))
    finally:
        client.close()


if __name__ == "__main__":
    reports_user_errors(lambda: asyncio.run(pull(sys.argv[1])))()
