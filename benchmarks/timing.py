"""Ratios of times measured alternately in one run: absolute times are noisy, ratios are not."""

import statistics
import time
from collections.abc import Callable, Mapping


def alternately(
    arms: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each arm, round after round; the order turns round by round."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            arms[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the round-by-round ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
