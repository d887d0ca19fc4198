"""`stillhouse prepare SOURCE --codec DIR`: see `recipes/preparing.py`."""

from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.preparing import PrepareRun, run

    config = parse(
        PrepareRun(),
        words,
        prog="stillhouse prepare",
        description="Encode images (and captions) once, as shards of latents to train from.",
        positional=("source",),
        examples=(
            "stillhouse prepare photos --codec CODEC --resolution 256 --out shards",
            "stillhouse prepare 'tars/*.tar' --codec CODEC --text minilm --workers 8",
        ),
    )
    index = run(config)
    counts = index["counts"]
    left_out = [f"{number} {reason}" for reason, number in counts["filtered"].items()]
    left_out += [f"{counts['failed']} failed, see failures.jsonl"] if counts["failed"] else []
    shape = " x ".join(map(str, index["latent"]["shape"] or ())) or "no shape"
    print(
        f"{counts['kept']} latents ({shape}) of {counts['rows']} images in {config.out}"
        + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )
