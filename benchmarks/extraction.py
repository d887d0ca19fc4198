"""What a killed worker changes in a large extraction: nothing.

    STILLHOUSE_DATA=../shared/data python benchmarks/extraction.py [--count 20000] [--quick]

Two activations of reference/fashion, of the first so many images of Fashion-MNIST, on two workers
under torchrun: once left alone, and once where one worker is killed by SIGKILL when a third of the
shards is there and the command is given again. Last line, JSON, also in results/extraction.json
unless --quick: `identical` says whether every shard and the index are the same, byte for byte;
`kept`, whether the shards that were there at the kill were left as they were.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from prepare import family

from stillhouse.features.store import StoredFeatures

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
IDS = ("mid-vit-out", "up-level0-repeat1-vit-out")
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="few images: shows that it works")
    given = parser.parse_args()
    count, shard = (128, 16) if given.quick else (given.count, 256)
    with tempfile.TemporaryDirectory() as folder:
        result = compare(Path(folder), count, shard)
    result |= {"quick": given.quick, "workers": WORKERS, "cores": os.cpu_count()}
    if not given.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "extraction.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def compare(folder: Path, count: int, shard: int) -> dict[str, Any]:
    calm, disturbed = folder / "calm", folder / "disturbed"
    began = time.perf_counter()
    assert start(calm, count, shard).wait() == 0
    seconds = time.perf_counter() - began
    shards = -(-count // shard)
    first = start(disturbed, count, shard)
    kill_second_worker(first, disturbed, shards // 3)
    assert first.wait() != 0
    left = {path.name: path.stat().st_mtime_ns for path in disturbed.glob("*.safetensors")}
    assert start(disturbed, count, shard).wait() == 0
    return {
        "identical": contents(calm) == contents(disturbed),
        "kept": all((disturbed / name).stat().st_mtime_ns == left[name] for name in left),
        "images": len(StoredFeatures(disturbed)),
        "shards": shards,
        "killed_when_done": len(left),
        "seconds_undisturbed": round(seconds),
    }


def start(out: Path, count: int, shard: int) -> subprocess.Popen[bytes]:
    words = ["extract", str(ROOT / "reference/fashion"), "--images", "fashion", "--out", str(out)]
    words += ["--selection", *IDS, "--count", str(count), "--shard", str(shard), "--batch", "16"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    command = [sys.executable, *launcher, "-m", "stillhouse", "features", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def kill_second_worker(job: subprocess.Popen[bytes], out: Path, shards: int) -> None:
    while len(list(out.glob("*.safetensors"))) < shards:
        assert job.poll() is None
        time.sleep(0.02)
    workers = [
        pid
        for pid in family(job.pid)[1:]
        if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)


def contents(folder: Path) -> dict[str, str]:
    """Of the shards and the index; run.json knows its own folder."""
    files = [*folder.glob("*.safetensors"), folder / "index.json"]
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


if __name__ == "__main__":
    main()
