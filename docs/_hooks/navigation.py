"""`Results: results/` in the navigation: all pages of a folder, sub-folders as sections."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files

TITLES = {"reference/options/": "Options of commands", "reference/python/": "Python"}


@event_priority(-100)  # once all pages are there
def on_files(files: Files, config: MkDocsConfig) -> Files:
    uris = [file.src_uri for file in files.documentation_pages()]
    config.nav = filled(config.nav, uris)
    return files


def filled(entry: Any, uris: list[str]) -> Any:
    if isinstance(entry, dict):
        return {title: filled(one, uris) for title, one in entry.items()}
    if isinstance(entry, str):
        return below(entry, uris) if entry.endswith("/") else entry
    found = [filled(one, uris) for one in entry]
    return [one for each in found for one in (each if isinstance(each, list) else [each])]


def below(folder: str, uris: list[str]) -> list[Any]:
    """Pages of a folder, its index first, then its sub-folders as sections."""
    rest = [uri for uri in uris if uri.startswith(folder)]
    own = [uri for uri in rest if "/" not in uri.removeprefix(folder)]
    first = sorted(own, key=lambda uri: not uri.endswith("/index.md"))
    inner = dict.fromkeys(
        f"{folder}{uri.removeprefix(folder).split('/')[0]}/" for uri in rest if uri not in own
    )
    sections = [
        {TITLES.get(one, one.split("/")[-2].capitalize()): below(one, uris)} for one in inner
    ]
    return [*first, *sections]
