"""Over the S3 protocol, against moto's server on this machine, which can be told to misbehave."""

import socket
import threading
from collections import Counter

import pytest
from data.pictures import numbers, write_folder, write_shards

from stillhouse.data import Columns, DataConfig, Folder, ImageConfig, Parquet, Tars
from stillhouse.data.sources import Source

pytestmark = pytest.mark.slow

pytest.importorskip("moto.server", reason="pip install 'moto[server]' to test object storage")
s3fs = pytest.importorskip("s3fs", reason="pip install 's3fs' to test object storage")


class Unruly:
    """A server that answers every `every`-th download with a 503 or hangs up half-way."""

    def __init__(self, app):
        self.app, self.every, self.counts = app, 0, Counter()

    def __call__(self, environ, start_response):
        path = environ["PATH_INFO"]
        download = environ["REQUEST_METHOD"] == "GET" and path.endswith((".tar", ".parquet"))
        if self.every and download:
            self.counts["downloads"] += 1
            if self.counts["downloads"] % self.every == 0:
                return self.misbehave(environ, start_response)
        return self.app(environ, start_response)

    def misbehave(self, environ, start_response):
        if self.counts["faults"] % 2:
            self.counts["faults"] += 1
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        self.counts["faults"] += 1
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"]


@pytest.fixture(scope="module")
def server():
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = Unruly(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield app, f"http://127.0.0.1:{server.port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def storage(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)  # which an object store is not of
    app, url = server
    app.every = 0
    app.counts.clear()
    return {"endpoint_url": url}


def upload(folder, bucket, storage):
    fs = s3fs.S3FileSystem(**storage, skip_instance_cache=True)
    fs.mkdir(bucket)
    fs.put(str(folder), f"{bucket}/train", recursive=True)


def ids(config, steps, **options):
    items = iter(config.build(batch=5, seed=1, **options))
    out = []
    for _ in range(steps):
        item = next(items)
        out.append((item.batch.ids.tolist(), numbers(item.batch)))
    return out, item.state


def over(source: Source, **options):
    columns = Columns(image="png") if isinstance(source, Tars) else Columns()
    return DataConfig(source=source, columns=columns, image=ImageConfig(size=8), **options)


@pytest.mark.parametrize(
    ("kind", "streaming"), [("tars", True), ("parquet", True), ("parquet", False)]
)
def test_the_same_samples_as_from_disk(kind, streaming, storage, tmp_path):
    make = Tars if kind == "tars" else Parquet
    glob = write_shards(tmp_path / "data", kind, [6, 7, 8, 4])
    bucket = f"same-{kind}-{streaming}".lower()
    upload(tmp_path / "data", bucket, storage)
    local = over(make(files=(glob,), streaming=streaming), buffer=6)
    url = f"s3://{bucket}/train/*.{'tar' if kind == 'tars' else kind}"
    remote = over(make(files=(url,), streaming=streaming, storage=storage), buffer=6)
    assert ids(remote, 8)[0] == ids(local, 8)[0]


def test_folders(storage, tmp_path):
    write_folder(tmp_path / "data", 12)
    upload(tmp_path / "data", "folders", storage)
    config = over(Folder(path="s3://folders/train", storage=storage))
    assert sorted(n for _, seen in ids(config, 3, stop=12)[0] for n in seen) == list(range(12))


@pytest.mark.parametrize("workers", [0, 1])
def test_faults_of_the_store_lose_nothing(workers, server, storage, tmp_path):
    bucket = f"unruly-{workers}"
    write_shards(tmp_path / "data", "tars", [6, 7, 8, 4, 9])
    upload(tmp_path / "data", bucket, storage)
    source = Tars(files=(f"s3://{bucket}/train/*.tar",), storage=storage)
    config = over(source, buffer=6, workers=workers)
    calm, _ = ids(config, 12)
    app, _ = server
    app.every = 2
    first, state = ids(config, 5)
    rest, _ = ids(config, 7, resume=[state])
    assert first + rest == calm
    assert app.counts["faults"] >= 4
