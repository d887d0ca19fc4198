"""The command line: `stillhouse COMMAND ...`. Commands are imported when they are called."""

import sys
from collections.abc import Sequence

COMMANDS = {
    "prepare": "encode images and captions once, as shards of latents",
    "plan": "say what a run will need, before anyone pays for it",
    "train": "train a recipe, or resume it",
    "distill": "make a student of few evaluations from a checkpoint",
    "report": "draw a training run into one HTML page",
    "export": "hand on the model of a training run, with a card",
    "evaluate": "measure a model or images against a reference",
    "sample": "draw images from a checkpoint, or trajectories of a 2-D toy",
    "features": "read what a model knows of images from its activations",
    "demo": "try a model in the browser, beside its student",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; the first word is the command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else "--help"
    if command in ("--help", "-h", "help"):
        print(usage())
    elif command == "--version":
        from stillhouse import __version__

        print(__version__)
    elif command in COMMANDS:
        run_command(command, words[1:])
    else:
        from difflib import get_close_matches

        close = get_close_matches(command, COMMANDS, 1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise SystemExit(f"stillhouse: there is no command {command!r}.{hint}\n\n{usage()}")


def usage() -> str:
    """The list of commands."""
    rows = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    return (
        "Stillhouse takes a diffusion model through its whole life.\n\n"
        f"usage: stillhouse COMMAND ...\n\n{rows}\n\n"
        "stillhouse COMMAND --help shows all of a command's options."
    )


def run_command(command: str, words: list[str]) -> None:
    """Runs a command; errors that a person can mend are printed as their sentence."""
    from importlib import import_module

    from stillhouse.errors import UserError, storage_trouble

    try:
        import_module(f"stillhouse.cli.{command}").main(words)
    except UserError as error:
        print(f"stillhouse {command}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except OSError as error:
        sentence = storage_trouble(error)
        if not sentence:
            raise
        print(f"stillhouse {command}: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to resume", file=sys.stderr)
        raise SystemExit(130) from None
