"""One rank of a learner's pod: meets the others as `spo-learner` does, and writes down what it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from learner import world as ranks


def main(folder: Path) -> None:
    """Write `<rank>.json`: which pod and device it has, how many there are, and a sum over all."""
    world = ranks.start()
    (total,) = world.all_reduce_sum([float(2**world.rank)])
    told = {
        "pod": int(os.environ["JOB_COMPLETION_INDEX"]),
        "local": int(os.environ["LOCAL_RANK"]),
        "size": world.size,
        "sum": total,
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(told), encoding="utf-8")
    world.barrier()
    ranks.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
