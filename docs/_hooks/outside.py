"""What pages of the site refer to outside of `docs`: model cards, pictures, folders, scripts.

| a page refers to | in the site |
|---|---|
| a page that is mirrored (`PAGES`) | a link to its copy |
| a picture | the picture, copied to `outside/` |
| anything else | a link into `repo_url` where mkdocs.yml has one, or else its path as text |
"""

import re
from posixpath import dirname, join, normpath, relpath
from re import Match
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import DOCS, ROOT

# Where it is in the repository -> where in the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    **{
        card.relative_to(ROOT).as_posix(): f"models/{card.parent.name}.md"
        for card in sorted(ROOT.glob("reference/*/README.md"))
    },
}
HOMES = {site: repository for repository, site in PAGES.items()}
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`(?!\]))", re.DOTALL | re.MULTILINE)
PICTURES = (".png", ".jpg", ".svg", ".gif", ".webp")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the copies of pages, and of every picture outside of `docs` that a page shows."""
    for home, site in PAGES.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / home)))
    for file in [*files.documentation_pages()]:
        home = home_of(file.src_uri)
        for match in links(file.content_string):
            place = place_of(home, match["target"])
            if match["picture"] and place and not inside(place):
                copied = File.generated(config, copy_of(place), abs_src_path=str(ROOT / place))
                if copied.src_uri not in files.src_uris:
                    files.append(copied)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    home = home_of(page.file.src_uri)

    def rewritten(match: Match[str]) -> str:
        place = place_of(home, match["target"])
        if place is None or (inside(place) and inside(home)):
            return match[0]
        uri = site_uri(place)
        if uri is None:
            return elsewhere(match["text"], place, config.repo_url)
        fragment = urlsplit(match["target"]).fragment
        target = relpath(uri, dirname(page.file.src_uri) or ".") + (fragment and f"#{fragment}")
        return f"{match['picture']}[{match['text']}]({target})"

    parts = CODE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(rewritten, part) for i, part in enumerate(parts))


def links(markdown: str) -> list[Match[str]]:
    return [match for part in CODE.split(markdown)[::2] for match in LINK.finditer(part)]


def home_of(uri: str) -> str:
    """The place in the repository of a page of the site."""
    return HOMES.get(uri, f"{DOCS.name}/{uri}")


def place_of(home: str, target: str) -> str | None:
    """The place in the repository that a link of a page leads to; none if it leaves it."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    return normpath(join(dirname(home), parts.path))


def inside(place: str) -> bool:
    return place.startswith(f"{DOCS.name}/")


def copy_of(place: str) -> str:
    return f"outside/{place}"


def site_uri(place: str) -> str | None:
    """Where the site has what is at this place of the repository, if it has it."""
    if inside(place):
        return place.removeprefix(f"{DOCS.name}/")
    if place.endswith(PICTURES):
        return copy_of(place)
    return PAGES.get(place) or PAGES.get(f"{place}/README.md")


def elsewhere(text: str, place: str, repo_url: str | None) -> str:
    """A place that the site does not have."""
    if repo_url:
        return f"[{text}]({repo_url.rstrip('/')}/tree/main/{place})"
    return (
        f"`{place}`" if text.strip("`") in (place, place.rsplit("/")[-1]) else f"{text} (`{place}`)"
    )
