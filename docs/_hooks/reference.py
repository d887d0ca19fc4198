"""Makes the reference when the site is built: commands, their options, and the Python packages.

Nothing of it is kept in the repository: help comes from the parser, options from the configs, and
mkdocstrings reads the docstrings.
"""

import ast
from collections.abc import Iterator
from functools import cache

from commands import every_command, help_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from options import options_of
from pages import ROOT, heading, joined, table
from pydantic import BaseModel

SOURCE = ROOT / "src"
INDEX, COMMANDS = "reference/index.md", "reference/commands.md"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
HERE = "<!-- generated pages -->"  # where the index lists them

# Page -> what it is about; the package, or the module, of that name.
PACKAGES = {
    "process": "sigma-space maths: adapters, predictions, keyed noise, exact denoisers",
    "process.levels": "grids, densities of training levels, the shift",
    "solvers": "samplers, guidance, schedule search",
    "couplings": "which noise meets which datum",
    "objectives": "losses and their weightings",
    "models": "networks, conditioning, codecs, text encoders, transfer",
    "distill": "few-step students and one-step generators",
    "features": "activations by name, their scores and their selection",
    "metrics": "detectors, statistics and distances",
    "engine": "the training loop, which knows nothing of diffusion",
    "data": "sources, crops, buckets, shards",
    "pipelines": "diffusers folders in and out",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {COMMANDS: commands_page()} | dict(options_pages()) | dict(python_pages())
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace(HERE, listing()) if page.file.src_uri == INDEX else markdown


@cache
def helps() -> dict[str, tuple[str, BaseModel | None]]:
    return {command: help_of(command) for command in every_command()}


def listing() -> str:
    """What there is, as tables of the index."""
    commands = [
        (f"[`stillhouse {name}`](commands.md#{dashed(name)})", what, options_link(name))
        for name, what in every_command().items()
    ]
    packages = [
        (f"[`stillhouse.{name}`](python/{name}.md)", what) for name, what in PACKAGES.items()
    ]
    return joined(
        [
            heading(2, "Commands"),
            table(("command", "what it does", "its options"), commands),
            heading(2, "Python"),
            table(("package", "what is in it"), packages),
        ]
    )


def options_link(command: str) -> str:
    _, config = helps()[command]
    return f"[tables](options/{dashed(command)}.md)" if config is not None else ""


def dashed(command: str) -> str:
    return command.replace(" ", "-")


def commands_page() -> str:
    blocks = [
        "# Commands",
        "What every command prints for `--help`, with the defaults of its first kinds of parts. "
        "[The tables](index.md#commands) have the options of every kind.",
    ]
    for command, (text, _) in helps().items():
        blocks.append(heading(2, f"stillhouse {command}", dashed(command)))
        blocks.append(f"```\n{text}\n```")
    return joined(blocks)


def options_pages() -> Iterator[tuple[str, str]]:
    for command, (_, config) in helps().items():
        if config is None:
            continue
        blocks = [
            heading(1, f"stillhouse {command}"),
            (type(config).__doc__ or "").strip(),
            "Every option with its default, as the command line and run files have it: "
            "`--optim.lr 2e-4` is the key `lr` below `optim`. A part that is a choice is switched "
            "by its name, `--optim adamw-8bit`, and then takes the options of that kind.",
            options_of(config),
        ]
        yield f"reference/options/{dashed(command)}.md", joined(blocks)


def python_pages() -> Iterator[tuple[str, str]]:
    for name, what in PACKAGES.items():
        head = [heading(1, f"stillhouse.{name}"), f"{what[0].upper()}{what[1:]}."]
        yield f"reference/python/{name}.md", joined([*head, *map(documented, modules(name))])


def documented(module: str) -> str:
    """A module's place for mkdocstrings; what a package takes from its modules is shown there."""
    file = SOURCE / module.replace(".", "/") / "__init__.py"
    if not file.is_file():
        return f"::: {module}"
    own = [n.name for n in ast.parse(file.read_text()).body if isinstance(n, DEFINITIONS)]
    return f"::: {module}\n    options:\n      members: {own or 'false'}"


def modules(name: str) -> list[str]:
    """A module alone, or a package's modules except for those that have a page of their own."""
    place = SOURCE / "stillhouse" / name.replace(".", "/")
    if not place.is_dir():
        return [f"stillhouse.{name}"]
    files = sorted(place.rglob("*.py"), key=lambda file: (file.name != "__init__.py", file))
    found = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    own = {f"stillhouse.{page}" for page in PACKAGES if page != name}
    return [one.removesuffix(".__init__") for one in found if one not in own]
