"""`stillhouse export RUN`: see `recipes/export/exporting.py`."""

from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.export.exporting import ExportRun, export

    config = parse(
        ExportRun(),
        words,
        prog="stillhouse export",
        description="Write a model as a folder to hand on, with a card: for diffusers, ONNX or "
        "torch.export (--format diffusers onnx), and to the hub (--push-to OWNER/NAME).",
        positional=("run",),
        examples=(
            "stillhouse export runs/photos --licence mit --out handed-on",
            "stillhouse export runs/photos --format diffusers onnx --out everywhere",
        ),
    )
    print(f"see {export(config)}")
