"""Readers that are killed leave nothing behind: batches do not travel through shared memory."""

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import fields

import torch
from data.pictures import write_shards

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.data.loaded import Stack

READ = """
import sys, time
from stillhouse.data import DataConfig
items = iter(DataConfig.model_validate_json(sys.argv[1]).build(batch=4, seed=0))
for _ in range(3):
    next(items)
print("reading", flush=True)
time.sleep(60)
"""


def config(tmp_path, workers: int) -> DataConfig:
    files = (write_shards(tmp_path / "data", "parquet", [9, 9]),)
    image = ImageConfig(size=8)
    return DataConfig(source=Parquet(files=files), image=image, workers=workers)


def test_a_killed_reader_leaves_no_files(tmp_path):
    temporary, shared = tmp_path / "temporary", set(os.listdir("/dev/shm"))
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", READ, config(tmp_path, 2).model_dump_json()],
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.2)
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared


def test_what_readers_send_holds_no_tensors(tmp_path):
    from stillhouse.data.indexed import _Fetch
    from stillhouse.data.loaded import Maker

    data = config(tmp_path, 0)
    images = data.source.open_indexed(Columns())
    item = _Fetch(images, Maker(data.image, Columns(), 0))[range(4)]
    assert isinstance(item, Stack)
    assert not any(isinstance(getattr(item, f.name), torch.Tensor) for f in fields(item))
    assert (pickle.loads(pickle.dumps(item)).pixels == item.pixels).all()
