"""Finding files behind paths, globs and URLs, and looking whether they can be read at all."""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

from stillhouse.errors import UserError, missing_extra, one_line

_NETWORK = {"aiohttp", "aiobotocore", "botocore", "fsspec", "httpx", "requests", "urllib3"}


def filesystem(url: str, storage: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it."""
    import fsspec

    url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
    try:
        return fsspec.core.url_to_fs(url, **(storage if "://" in url else {}))
    except ImportError as error:
        if url.startswith("s3:"):
            raise missing_extra("s3fs", "s3") from error
        raise UserError(f"{url} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise UserError(f"{url} is not a path or URL that can be read: {error}") from error


def is_folder(url: str, storage: Mapping[str, Any]) -> bool:
    if not url:
        return False
    fs, path = filesystem(url, storage)
    return fs.isdir(path)


def find(patterns: Iterable[str], suffix: str, storage: Mapping[str, Any]) -> list[str]:
    """All files that the patterns name, sorted, each once. A pattern without any is an error."""
    found: set[str] = set()
    for pattern in patterns:
        try:
            paths = _match(pattern, suffix, storage)
        except Exception as error:  # whatever the client of a remote store raises
            if isinstance(error, UserError) or "://" not in pattern:
                raise
            raise UserError(
                f"{pattern} cannot be reached ({one_line(error)}). Check the address and the "
                "network, or name local files as --data.source.files"
            ) from error
        if not paths:
            raise UserError(f"no files match {pattern!r}: check the path and the glob")
        found.update(paths)
    return sorted(found)


def _match(pattern: str, suffix: str, storage: Mapping[str, Any]) -> list[str]:
    fs, path = filesystem(pattern, storage)
    if any(c in path for c in "*?["):
        paths = fs.glob(path)
    elif fs.isdir(path):
        paths = fs.glob(f"{path.rstrip('/')}/**/*{suffix}")
    else:
        paths = [path] if fs.exists(path) else []
    return [_url(fs, p) for p in paths]


def _url(fs: Any, path: str) -> str:
    protocols = fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)
    return path if "file" in protocols else fs.unstrip_protocol(path)


def fingerprint(urls: Iterable[str], storage: Mapping[str, Any]) -> str:
    """Changes when a file is added, removed, renamed or written to; no content is read."""
    digest = hashlib.sha256()
    for url in urls:
        fs, path = filesystem(url, storage)
        facts = fs.info(path)
        changed = next((facts[k] for k in ("ETag", "etag", "mtime") if facts.get(k)), "")
        digest.update(f"{os.path.basename(path)} {facts['size']} {changed}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def trouble(url: str, builder: str, storage: Mapping[str, Any]) -> str:
    """Why a file gives no rows; empty if it seems to. Reads its footer or first header only."""
    import pyarrow.parquet

    fs, path = filesystem(url, storage)
    try:
        with fs.open(path, "rb") as file:
            if builder == "parquet":
                return "" if pyarrow.parquet.ParquetFile(file).metadata.num_rows else "no rows"
            with tarfile.open(fileobj=file, mode="r|*") as tar:
                return "" if tar.next() else "an empty archive"
    except (ValueError, tarfile.TarError, EOFError) as error:
        return f"{type(error).__name__}: {error}"


def passing(error: BaseException) -> bool:
    """Whether a read failed for reasons outside the file, so that trying again may help."""
    if isinstance(error, PermissionError):
        raise UserError(f"no permission to read the data: {error}") from error
    if isinstance(error, FileNotFoundError | UserError):
        return False
    return isinstance(error, OSError) or type(error).__module__.split(".")[0] in _NETWORK
