"""Reading WebDataset tars as a stream: members that share a name are one sample.

datasets 5.2 cannot stream tars from S3 (it hands `block_size` to the S3 session), so this is read
here. Seeking over the bodies of members makes skipping rows cheap, also on object stores.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from stillhouse.data.shardfiles import filesystem

# WebDataset's own rule: the name ends at the first dot after the last slash.
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_BLOCK = 8 << 20  # bytes that a remote file is asked for at a time

Members = dict[str, tarfile.TarInfo]


def read_tar(url: str, storage: Mapping[str, Any], start: int = 0) -> Iterator[dict[str, Any]]:
    """The samples from number `start` on, as {suffix: bytes}; json is parsed."""
    fs, path = filesystem(url, storage)
    with fs.open(path, "rb", block_size=_BLOCK) as file, tarfile.open(fileobj=file) as tar:
        for number, members in enumerate(_samples(tar)):
            if number >= start:
                yield {suffix: _value(tar, suffix, info) for suffix, info in members.items()}


def _samples(tar: tarfile.TarFile) -> Iterator[Members]:
    name, members = "", Members()
    while (info := tar.next()) is not None:
        tar.members = []  # type: ignore[assignment]  # it would remember every one it has seen
        match = _MEMBER.match(info.name)
        if not (match and info.isreg()):
            continue
        if members and match[1] != name:
            yield members
            members = Members()
        name = match[1]
        members[match[2]] = info
    if members:
        yield members


def _value(tar: tarfile.TarFile, suffix: str, info: tarfile.TarInfo) -> Any:
    file = tar.extractfile(info)
    data = file.read() if file else b""
    if len(data) < info.size:
        raise tarfile.ReadError("unexpected end of data")
    if suffix.split(".")[-1] != "json":
        return data
    try:
        return json.loads(data)
    except ValueError:
        return None  # this sample has no metadata; the others may
