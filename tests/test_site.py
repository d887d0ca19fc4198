"""The docs site: built without a warning, whole, and from this repository alone."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from stillhouse.cli import COMMANDS

pytest.importorskip("material", reason="pip install 'stillhouse[docs]'")

ROOT = Path(__file__).parents[1]
ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
# Flags of stillhouse train that are no part of a config, and those of torchrun.
OWN = {"scale", "dry-run", "processes", "help", "langevin", "correct"}
TORCHRUN = {"nnodes", "rdzv-endpoint", "rdzv-id", "max-restarts"}

pytestmark = pytest.mark.slow


@dataclass
class Read(HTMLParser):
    """What a page refers to, and the places within it that can be referred to."""

    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ASSETS and ASSETS[tag] in found:
            self.assets.append(found[ASSETS[tag]])


def read(page: Path) -> Read:
    found = Read()
    found.feed(page.read_text())
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """As CI has built it just before; otherwise built here, strictly: any warning is an error."""
    if given := os.environ.get("STILLHOUSE_SITE"):
        return Path(given)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Read]:
    return {page: read(page) for page in sorted(site.rglob("*.html")) if page.name != "404.html"}


def inner(target: str) -> bool:
    parts = urlsplit(target)
    return not parts.scheme and not parts.netloc


def place(page: Path, target: str) -> Path:
    path = unquote(urlsplit(target).path)
    return (page.parent / path).resolve() if path else page


def test_every_page_of_docs_is_in_the_site(site):
    for source in (ROOT / "docs").rglob("*.md"):
        assert (site / source.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), source


def test_navigation_holds_every_page(site, pages):
    home = site / "index.html"
    navigation = re.search(
        r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', home.read_text(), re.DOTALL
    )
    assert navigation
    listed = Read()
    listed.feed(navigation[0])
    reached = {place(home, link) for link in listed.links if inner(link)}
    assert {page.relative_to(site) for page in pages if page not in reached} == set()


def test_every_link_and_picture_resolves(pages):
    for page, found in pages.items():
        for target in [*found.links, *found.assets]:
            if not inner(target):
                continue
            there, fragment = place(page, target), urlsplit(target).fragment
            assert there.exists(), f"{page.name}: {target}"
            if fragment and there in pages:
                assert unquote(fragment) in pages[there].ids, f"{page.name}: {target}"


def test_nothing_is_fetched_from_elsewhere(site, pages):
    for page, found in pages.items():
        assert [asset for asset in found.assets if not inner(asset)] == [], page.name
    for sheet in site.rglob("*.css"):
        outside = re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\s]*", sheet.read_text())
        assert outside == [], sheet.name


def test_every_picture_says_what_it_shows(pages):
    pictures = [picture for page in pages for picture in re.findall("<img[^>]*>", page.read_text())]
    assert len(pictures) > 10
    assert [picture for picture in pictures if not re.search(r'alt="[^"]+|aria-', picture)] == []


def every_config() -> Iterator[tuple[str, object]]:
    """A few commands' configs, as the commands themselves make them."""
    from stillhouse.recipes.distill.settings import DistillRun
    from stillhouse.recipes.judge.evaluating import EvaluateRun
    from stillhouse.recipes.sampling import SampleRun
    from stillhouse.recipes.train.training import TrainRun

    yield from {"train": TrainRun(), "distill": DistillRun()}.items()
    yield from {"sample": SampleRun(), "evaluate": EvaluateRun()}.items()


def options_in(page: Path) -> set[str]:
    return set(re.findall(r"<code>--([\w.-]+)", page.read_text()))


def test_reference_has_every_option(site):
    from stillhouse.cli.parse import dotted

    for command, config in every_config():
        shown = options_in(site / f"reference/options/{command}.html")
        paths = {path.replace("_", "-") for path in dotted(config)}  # pyright: ignore[reportArgumentType]
        assert {path for path in paths if not path.endswith("kind")} - shown == set(), command


def test_reference_has_every_kind(pages, site):
    from stillhouse.distill.emd import METHODS
    from stillhouse.solvers import SOLVERS

    solvers = pages[site / "reference/options/sample.html"].ids
    methods = pages[site / "reference/options/distill.html"].ids
    assert {f"solver-{name}" for name in SOLVERS} <= solvers
    assert {f"method-{name}" for name in ("sfd", "sfd-v", *METHODS)} <= methods


def test_reference_has_every_command(site):
    page = (site / "reference/commands.html").read_text()
    for command in COMMANDS:
        assert f"usage: stillhouse {command}" in page, command


def documented(file: Path) -> list[str]:
    """Public functions and classes of a module that say what they are."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in ast.parse(file.read_text()).body if isinstance(node, kinds)]
    return [n.name for n in found if not n.name.startswith("_") and ast.get_docstring(n)]


PACKAGES = (
    *("process", "solvers", "couplings", "objectives", "models", "distill", "features"),
    *("metrics", "engine", "data", "pipelines"),
)


def test_reference_has_every_documented_name(pages, site):
    shown = {one for page, found in pages.items() if "python" in page.parts for one in found.ids}
    for package in PACKAGES:
        assert (site / f"reference/python/{package}.html").is_file()
        for file in (ROOT / "src/stillhouse" / package).rglob("*.py"):
            module = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
            module = module.removesuffix(".__init__")
            assert {f"{module}.{name}" for name in documented(file)} <= shown, module


MINE = ("troubleshooting.md", "upgrading.md", "index.md", "tutorials", "concepts", "reference")


def test_flags_that_pages_name_are_there(site):
    known = OWN | TORCHRUN
    for page in (site / "reference/options").glob("*.html"):
        known |= options_in(page)
    named = {}
    for name in MINE:
        start = ROOT / "docs" / name
        for page in [start] if start.is_file() else sorted(start.rglob("*.md")):
            others = r"^.*is not a flag here.*$|^ *pip install .*$"  # flags that are not ours
            text = re.sub(others, "", page.read_text(), flags=re.MULTILINE)
            flags = re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", text)
            named |= {flag: page.name for flag in flags if flag not in known}
    assert named == {}
