"""Training from and to object storage, against moto's server, which is told to misbehave."""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from resilience.runs import BATCH, Run, State, assert_same_state, ids, numbers, small, write_data

from stillhouse.data import Tars
from stillhouse.engine.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

pytest.importorskip("moto.server", reason="pip install 'moto[server]' to test object storage")
s3fs = pytest.importorskip("s3fs", reason="pip install 's3fs' to test object storage")

LENGTH = {"images": 24 * BATCH, "checkpoint_every": 6 * BATCH}


class Unruly:
    """Of every few requests one is answered with a 503, hung up on, or hung up on once it is done.

    The last is the worst: what was stored is stored, and the client does not know.
    """

    def __init__(self, app):
        self.app, self.every, self.requests = app, 0, 0
        self.faults: Counter[str] = Counter()

    def __call__(self, environ, start_response):
        self.requests += 1
        if not self.every or self.requests % self.every:
            return self.app(environ, start_response)
        kind = ("503", "hang up", "hang up when done")[self.faults.total() // 2 % 3]
        self.faults.update([kind, environ["REQUEST_METHOD"]])
        if kind == "503":
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]
        if kind == "hang up when done":
            list(self.app(environ, lambda *answer: None))
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return []


@pytest.fixture
def server(monkeypatch) -> Iterator[Unruly]:
    """The environment says where it is, as it would for any other tool."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = Unruly(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()  # of tests before, whose servers are gone
    yield app
    s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_lives_in_object_storage_and_loses_nothing_to_its_faults(server, tmp_path):
    data = write_data(tmp_path, "streamed")
    local = Run(small(tmp_path / "local", data, **LENGTH), tmp_path / "cache")
    local.end()
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.mkdir("bucket")
    fs.put(str(tmp_path / "streamed"), "bucket/train", recursive=True)
    source = Tars(
        files=("s3://bucket/train/*.tar",), storage={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    )
    remote = data.model_copy(update={"source": source})
    config = small(tmp_path / "first", remote, **LENGTH, checkpoints="s3://bucket/run")
    first = Run(config, tmp_path / "cache")
    server.every = 4
    with first.started() as process:
        # Past the second checkpoint, so that the first is complete.
        first.wait_until(lambda: first.reached >= 14 * BATCH, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # Another machine, which has nothing but the address.
    second = first.twin("second")
    second.end()
    server.every = 0
    assert min(server.faults[kind] for kind in ("503", "hang up", "hang up when done")) >= 3
    assert min(server.faults[method] for method in ("GET", "PUT")) >= 3
    resumed = second.log[0]["images"]
    assert resumed >= 6 * BATCH
    assert_same_state(State.of(second), State.of(local))
    both = [line for line in first.log if line["images"] <= resumed] + second.log
    assert numbers(both) == numbers(local.log)
    assert ids(both) == ids(local.log)
    names = CheckpointStore(config.checkpoints).root.names()
    assert names == sorted(path.name for path in (local.out / "checkpoints").iterdir())
