"""The prefetch thread: same noise anywhere, position of what was consumed, clean ends."""

import threading
import time
import traceback
from dataclasses import replace

import pytest
import torch
from data.pictures import write_shards

from stillhouse.data import Columns, DataConfig, ImageConfig, Loaded, Parquet, Prefetch, Tars
from stillhouse.errors import UserError
from stillhouse.process import Batch


def items(count=10, rows=4, fail=None, wait=0.0):
    for step in range(count):
        if step == fail:
            raise_here()
        time.sleep(wait)
        key = torch.arange(step * rows, (step + 1) * rows)
        batch = Batch(data=torch.zeros(rows, 1, 2, 2), ids=key, key=key)
        yield Loaded(batch, None, state={"images": (step + 1) * rows})


def raise_here():
    raise RuntimeError("the disk is on fire")


def threads():
    return [t for t in threading.enumerate() if t.name == "stillhouse-prefetch"]


def test_batches_are_prepared_in_the_thread():
    seen = []

    def double(batch):
        seen.append(threading.current_thread().name)
        return replace(batch, noise=2.0 * batch.key)

    with Prefetch(items(), double) as prefetch:
        batch = Batch.cat([item.batch for item in prefetch])
    assert torch.equal(batch.noise, 2.0 * torch.arange(40))
    assert set(seen) == {"stillhouse-prefetch"}


def test_the_state_is_that_of_the_last_batch_consumed():
    with Prefetch(items(), depth=4, state={"images": 0}) as prefetch:
        assert prefetch.state == {"images": 0}
        for step in range(1, 6):
            item = next(prefetch)
            time.sleep(0.01)  # the thread runs ahead
            assert prefetch.state == item.state == {"images": 4 * step}


def test_an_error_arrives_in_order_with_its_traceback():
    prefetch = Prefetch(items(fail=3))
    for _ in range(3):
        next(prefetch)
    with pytest.raises(RuntimeError, match="on fire") as error:
        next(prefetch)
    assert "raise_here" in "".join(traceback.format_tb(error.value.__traceback__))
    with pytest.raises(StopIteration):
        next(prefetch)
    assert not threads()


def test_an_error_of_the_preparation_arrives_too():
    def refuse(batch):
        raise UserError("the pool is empty")

    with Prefetch(items(), refuse) as prefetch, pytest.raises(UserError):
        next(prefetch)


def test_it_ends_with_the_data_and_can_be_closed_twice():
    prefetch = Prefetch(items(3))
    assert len(list(prefetch)) == 3
    prefetch.close()
    prefetch.close()
    assert list(prefetch) == []
    assert not threads()


def test_closing_early_ends_the_thread():
    prefetch = Prefetch(items(10**9))
    next(prefetch)
    prefetch.close()
    assert not threads()


def test_the_queue_is_bounded():
    taken = []

    def watched():
        for item in items(100):
            taken.append(item)
            yield item

    with Prefetch(watched(), depth=2) as prefetch:
        time.sleep(0.2)
        assert len(taken) == 3  # two ready, one in hand
        next(prefetch)


def test_waiting_is_measured():
    with Prefetch(items(5, wait=0.05)) as slow:
        for _ in slow:
            pass
    assert 0.15 < slow.waited < 1.0
    with Prefetch(items(5), depth=5) as ready:
        time.sleep(0.2)
        for _ in range(5):
            next(ready)
    assert ready.waited < 0.02


@pytest.mark.parametrize("streaming", [False, True])
def test_loader_workers_end_with_it_and_the_position_holds(streaming, tmp_path):
    import multiprocessing

    kind = "tars" if streaming else "parquet"
    files = (write_shards(tmp_path / "data", kind, [9, 9, 9]),)
    if streaming:
        source, columns = Tars(files=files), Columns(image="png")
    else:
        source, columns = Parquet(files=files), Columns()
    image = ImageConfig(size=8)
    config = DataConfig(source=source, columns=columns, image=image, workers=2, buffer=4)
    with Prefetch(config.build(batch=3, seed=0), depth=3) as prefetch:
        whole = [next(prefetch).batch.ids.tolist() for _ in range(8)]
    with Prefetch(config.build(batch=3, seed=0), depth=3) as prefetch:
        assert [next(prefetch).batch.ids.tolist() for _ in range(3)] == whole[:3]
        time.sleep(0.1)
        state = prefetch.state
    with Prefetch(config.build(batch=3, seed=0, resume=[state])) as prefetch:
        assert [next(prefetch).batch.ids.tolist() for _ in range(5)] == whole[3:]
    assert multiprocessing.active_children() == []
