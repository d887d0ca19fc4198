"""`stillhouse sample MODEL`: see `recipes/sampling.py`."""

import re
from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.sampling import SampleRun, run

    config = parse(
        SampleRun(),
        [re.sub(r"^--correct(?=$|=)", "--correct.steps", word) for word in words],
        prog="stillhouse sample",
        description="Draw samples from a diffusers checkpoint, or from toy:moons and its like.",
        positional=("model",),
        examples=(
            "stillhouse sample reference/fashion --steps 10 --count 64 --out drawn",
            "stillhouse sample reference/emoji-student --prompt 'red apple' --steps 3",
            "stillhouse sample toy:moons --solver heun --steps 20 --out moons",
        ),
    )
    if config.correct.steps:
        from stillhouse.recipes.distill.correcting import run as correct

        print(f"{config.count} samples before and after: see {correct(config)}")
        return
    record = run(config)
    if "evaluations_per_sample" in record:  # the first process, which writes the record
        picture = next(p for p in ("trajectories.png", "grid.png") if (config.out / p).is_file())
        print(
            f"{config.count} samples in {config.out} ({record['drawn_now']} drawn now, "
            f"{record['evaluations_per_sample']} evaluations each); see {config.out / picture}"
        )
