"""Where checkpoints lie: a folder on a disk or in an object store, and torch's way into it.

torch's own fsspec writer is a private module, and it neither hashes what it writes nor retries; so
torch's public FileSystemWriter and FileSystemReader are given a file system of ours instead. This
is the one file that leans on how they work. What they write stays torch's own format.
"""

import hashlib
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, TypeVar

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stillhouse.engine.contents import MANIFEST, CheckpointError, FileRecord, read_metadata
from stillhouse.errors import UserError
from stillhouse.files import write_whole

T = TypeVar("T")

METADATA = ".metadata"
CHUNK = 2**23
ATTEMPTS = 4
# Folders are only prefixes there; s3fs answers makedirs by listing the whole bucket.
_NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}
# Asking again does not mend these.
_FINAL = (FileNotFoundError, PermissionError, NotADirectoryError, UnpicklingError, UserError)


class Folder:
    """A folder by path or fsspec URL. Where it is remote, what fails is tried again."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str):
        self.fs: Any = fs
        self.path = path.rstrip("/")
        self.local = isinstance(fs, LocalFileSystem)

    @classmethod
    def at(cls, root: str | Path, options: dict[str, Any] | None = None) -> "Folder":
        """The folder that a user names."""
        where = root if "://" in str(root) else Path(root).expanduser().absolute()
        try:
            return cls(*fsspec.url_to_fs(str(where), **(options or {})))
        except (ImportError, ValueError) as error:
            raise UserError(f"{root} cannot be opened: {error}") from error

    def __str__(self) -> str:
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.fs, f"{self.path}/{name}")

    def patiently(self, work: Callable[[], T], pause: float = 0.5) -> T:
        """Object stores answer 503 and drop connections; disks don't get better by waiting."""
        for attempt in range(0 if self.local else ATTEMPTS - 1):
            try:
                return work()
            except _FINAL:
                raise
            except Exception:
                time.sleep(pause * 2**attempt)
        return work()

    def names(self) -> list[str]:
        """What lies directly in it; nothing, if it does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.patiently(lambda: self.fs.ls(self.path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in found)

    def make(self) -> None:
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else self.fs.protocol
        if not _NO_FOLDERS.intersection(protocols):
            self.fs.makedirs(self.path, exist_ok=True)

    def read(self, name: str) -> bytes:
        return self.patiently(lambda: self.fs.cat_file(f"{self.path}/{name}"))

    def write(self, name: str, data: bytes) -> FileRecord:
        """The whole file or none of it: object stores put at once, disks rename."""
        self.make()
        if self.local:
            self._replace(name, data)
        else:
            self.patiently(lambda: self.fs.pipe_file(f"{self.path}/{name}", data))
        return FileRecord(len(data), hashlib.sha256(data).hexdigest())

    def _replace(self, name: str, data: bytes) -> None:
        write_whole(Path(self.path, name), data, durable=True)
        self.sync()

    def sync(self) -> None:
        """Names are on the disk only when their folder is."""
        if self.local and os.name == "posix":
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def size(self, name: str) -> int:
        self.fs.invalidate_cache()
        return self.patiently(lambda: int(self.fs.info(f"{self.path}/{name}")["size"]))

    def sha256(self, name: str) -> str:
        return self.patiently(lambda: self._sha256(name))

    def _sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with self.fs.open(f"{self.path}/{name}", "rb", block_size=CHUNK) as file:
            while data := file.read(CHUNK):
                digest.update(data)
        return digest.hexdigest()

    def damage(self, name: str, record: FileRecord) -> str | None:
        """In what a file is not what it was when it was written."""
        try:
            if (size := self.size(name)) != record.size:
                return f"{name} has {size} bytes instead of {record.size}"
            if self.sha256(name) != record.sha256:
                return f"{name} has changed since it was written (SHA-256)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
        return None

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.patiently(lambda: self.fs.rm_file(f"{self.path}/{name}"))

    def clear(self) -> None:
        """Removes it with all it holds, the manifest first: half removed, it is no checkpoint."""
        if self.names():
            self.remove(MANIFEST)
        with suppress(FileNotFoundError):
            self.patiently(lambda: self.fs.rm(self.path, recursive=True))
        self.fs.invalidate_cache()


class _HashingStream:
    """Hashes what goes through to the file: the manifest says what was meant, not what is there."""

    def __init__(self, file: IO[bytes]):
        self.file, self.digest, self.written = file, hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as failure:
            self.failure = self.failure or failure  # torch.save reports something else
            raise
        self.digest.update(data)
        self.written += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        """Left to the end: torch asks for it after every tensor."""

    def close(self) -> None:
        """Left to the file system, which syncs first."""

    def record(self) -> FileRecord:
        return FileRecord(self.written, self.digest.hexdigest())


class RecordedFiles(FileSystem):
    """A Folder as torch's writer and reader use one; `written` has what went through it."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        whole = f"{self.folder.path}/{path}"
        if mode == "rb":
            with self.folder.fs.open(whole, mode, block_size=CHUNK) as file:
                yield file
            return
        with self._writing(str(path), whole) as stream:
            yield stream
        self.written[str(path)] = stream.record()

    @contextmanager
    def _writing(self, name: str, whole: str) -> Generator[_HashingStream, None, None]:
        stream: _HashingStream | None = None
        try:
            file = self.folder.fs.open(whole, "wb")
            stream = _HashingStream(file)
            yield stream
            file.flush()
            if self.folder.local:
                os.fsync(file.fileno())
            file.close()
        except Exception as error:
            if stream is not None:
                _discard(stream.file)
            failure = (stream and stream.failure) or error
            # A plain OSError, since ranks tell each other of it and not every error can be pickled.
            reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
            raise OSError(f"{name}: {reason}") from error

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return suffix

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        old, new = (f"{self.folder.path}/{name}" for name in (path, new_path))
        self.folder.fs.mv(old, new)
        self.written[str(new_path)] = self.written.pop(str(path))

    def mkdir(self, path: str | os.PathLike) -> None:
        self.folder.make()

    def exists(self, path: str | os.PathLike) -> bool:
        """The folder was cleared before: there is only what this save has written."""
        return str(path) in self.written

    def rm_file(self, path: str | os.PathLike) -> None:
        self.folder.remove(str(path))


def _discard(file: Any) -> None:
    """Closes without completing: closing an object store's file would upload the part there is."""
    with suppress(Exception):
        if hasattr(file, "discard") and not isinstance(file.fs, LocalFileSystem):
            file.discard()
    with suppress(Exception):
        file.close()


class Writer(FileSystemWriter):
    """torch's writer into a Folder."""

    def __init__(self, folder: Folder):
        super().__init__(str(folder), sync_files=False)  # synced above; torch would sync all disks
        self.fs = self.files = RecordedFiles(folder)
        self.path = str(folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        write = super().write_data
        return self.files.folder.patiently(lambda: write(plan, planner))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        finish = super().finish
        self.files.folder.patiently(lambda: finish(metadata, results))


class Reader(FileSystemReader):
    """torch's reader from a Folder, which unpickles nothing but descriptions of tensors."""

    def __init__(self, folder: Folder, files: set[str]):
        super().__init__(str(folder))
        self.fs = RecordedFiles(folder)
        self.path, self.folder, self.files = str(folder), folder, files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            metadata = read_metadata(self.folder.read(METADATA), self.files)
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self._metadata = metadata
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        read = super().read_data
        try:
            return self.folder.patiently(lambda: read(plan, planner))
        except UnpicklingError as error:  # torch's own restricted unpickler, for tensors
            files = sorted({self.storage_data[i.storage_index].relative_path for i in plan.items})
            raise CheckpointError(
                f"{', '.join(files)} holds more than tensors; nothing of it was run"
            ) from error


class TensorsOnly(DefaultLoadPlanner):
    """torch's planner would unpickle what is not a tensor, without restriction."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is pickled; that is never loaded")


def host_memory() -> DefaultStager:
    """Copies into memory that is kept from save to save, pinned where there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=gpu,
        )
    )
