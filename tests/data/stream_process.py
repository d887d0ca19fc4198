"""A process that streams until it is killed: config, rank of two, where to write, states."""

import json
import sys
import time

from stillhouse.data import DataConfig


def main(config, rank, out, resume):
    loader = DataConfig.model_validate_json(config).build(
        batch=6, seed=5, rank=int(rank), world=2, resume=json.loads(resume)
    )
    with open(out, "a") as file:
        for item in loader:
            line = {"ids": item.batch.ids.tolist(), "state": item.state}
            print(json.dumps(line), file=file, flush=True)
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
