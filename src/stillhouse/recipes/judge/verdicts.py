"""What an evaluation concludes: its table, warnings, picture, and the cheapest good setting.

A record (see `evaluating.py`) has a row per setting with the values of each seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from stillhouse.metrics.frechet import TRUSTED
from stillhouse.recipes.claims import without_places
from stillhouse.recipes.judge.measures import DISTANCES
from stillhouse.recipes.pictures import pyplot

Record = Mapping[str, Any]
COLOURS = ("#1d5b8f", "#d1862f", "#4a8f3c", "#8e5ea2", "#b03a48", "#5b6b7b")
PUBLISHED = ("Inception", "DINOv2", "CLIP")  # detectors with numbers to compare with


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; one seed has none."""
    return stdev(values) if len(values) > 1 else None


def said(values: Sequence[float]) -> str:
    """Mean and spread, in as many digits as are worth reading."""
    around = spread(values)
    return f"{fmean(values):.4g}" + ("" if around is None else f" ± {around:.2g}")


def describe(row: Record) -> str:
    if not row["solver"]:
        return "images"
    return f"{row['solver']}, {row['steps']} steps"


# ---------------------------------------------------------------- words


def cheapest(record: Record) -> dict[str, Any] | None:
    """The setting of a sweep with the fewest evaluations that is as good as the best, nearly.

    Judged by the first metric, which has to be a distance.
    """
    rows = record["settings"]
    if len(rows) < 2 or record["metrics"][0] not in DISTANCES:
        return None
    metric = next(iter(rows[0]["values"]))
    means = [fmean(row["values"][metric]) for row in rows]
    bound = min(means) + abs(min(means)) * record["within"] / 100
    good = [
        (row["evaluations"], mean, i)
        for i, (row, mean) in enumerate(zip(rows, means, strict=True))
        if mean <= bound
    ]
    evaluations, mean, index = min(good)
    return {
        "solver": rows[index]["solver"],
        "steps": rows[index]["steps"],
        "evaluations": evaluations,
        "metric": metric,
        "value": mean,
        "best": min(means),
    }


def warnings(record: Record) -> list[str]:
    """What a reader of the numbers must know."""
    found = caveats(record)
    if record["seeds"] == 1:
        found.append("one seed: the spread is unknown (--seeds 3 shows it)")
    return found


def caveats(record: Record) -> list[str]:
    """What follows from the counts and the detector."""
    found, name = [], record["detector"]["name"]
    count, dims, bias = record["count"], record["dims"], record["expected_of_a_perfect_model"]
    if bias is not None and count < TRUSTED * dims:
        found.append(
            f"{count} samples for {dims} dimensions: a perfect model would get a Fréchet distance "
            f"of about {bias:.3g} (if features were Gaussian). Compare at the same count only, or "
            "look at the kernel distance"
        )
    known = record["reference"]["count"]
    if bias is not None and known < TRUSTED * dims:
        found.append(
            f"the reference has {known} images for {dims} dimensions: what it lacks itself is in "
            "every Fréchet distance from it, and not in the estimate above"
        )
    if record["floor"] and record["floor_count"] < count:
        found.append(
            f"real / real is of {record['floor_count']} images, the samples are {count}: of the "
            "distances, only the kernel distance compares"
        )
    if name not in PUBLISHED:
        found.append(
            f"features are {name}'s: these distances are not FID or KID and do not compare with "
            "published ones"
        )
    return found


def show(record: Record) -> None:
    """The table and all that belongs to it, on the terminal."""
    from rich.console import Console

    console = Console()
    console.print(table(record))
    reference = record["reference"]
    console.print(
        f"{record['count']} samples against {reference['count']} of {reference['name']} "
        f"({reference['reading']}); {record['detector']['name']}: "
        f"{record['detector']['preprocessing']}",
        highlight=False,
    )
    for warning in record["warnings"]:
        console.print(f"note: {warning}", highlight=False)
    if choice := record["recommended"]:
        console.print(
            f"cheapest within {record['within']:g}% of the best {choice['metric']}: "
            f"{choice['solver']}, {choice['steps']} steps ({choice['evaluations']} evaluations): "
            f"{choice['value']:.4g}, the best is {choice['best']:.4g}",
            highlight=False,
        )


def table(record: Record) -> Any:
    """One setting as a column of metrics; a sweep as a row per setting. The floor beside it."""
    from rich.table import Table

    seeds = f"mean ± standard deviation of {record['seeds']} seeds" if record["seeds"] > 1 else ""
    result = Table(title=str(record["model"]), caption=seeds or None)
    (_one if len(record["settings"]) == 1 else _many)(record, result)
    return result


def _floor(record: Record, name: str) -> str:
    return f"{record['floor'][name]:.4g}" if name in record["floor"] else ""


def _one(record: Record, result: Any) -> None:
    row = record["settings"][0]
    for title in ("", describe(row), f"real / real ({record['floor_count']})"):
        result.add_column(title, justify="right" if title else "left")
    for name, values in row["values"].items():
        result.add_row(name, said(values), _floor(record, name))


def _many(record: Record, result: Any) -> None:
    names = list(record["settings"][0]["values"])
    result.add_column("")
    for title in ("evaluations", *names):
        result.add_column(title, justify="right")
    for row in record["settings"]:
        cells = (said(row["values"][name]) for name in names)
        result.add_row(describe(row), str(row["evaluations"]), *cells)
    result.add_section()
    floors = (_floor(record, name) for name in names)
    result.add_row(f"real / real ({record['floor_count']})", "", *floors, style="dim")


# ---------------------------------------------------------------- pictures


def draw(record: Record, target: Path) -> None:
    """A sweep as curves over evaluations; anything else as dots, one per seed."""
    plt = pyplot()
    names = list(record["settings"][0]["values"])[:4]
    figure, axes = plt.subplots(
        1, len(names), figsize=(max(3.2 * len(names), 5), 3.4), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        (_curves if len(record["settings"]) > 1 else _dots)(axis, record, name)
        if name in record["floor"]:
            axis.axhline(record["floor"][name], color="#9aa5b1", ls="--", lw=1, label="real / real")
        axis.set_title(name, fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(
        f"{without_places(record['model'])}: {record['count']} samples, {record['seeds']} seed(s)",
        fontsize=9,
    )
    figure.savefig(target, dpi=130)
    plt.close(figure)


def _apart(ticks: Sequence[int]) -> list[int]:
    """Those that leave room for their numbers on a logarithmic axis."""
    kept = list(ticks[:1])
    for tick in ticks[1:]:
        if tick >= 1.25 * kept[-1]:
            kept.append(tick)
    return kept


def _curves(axis: Any, record: Record, name: str) -> None:
    from matplotlib import ticker as plain

    solvers = dict.fromkeys(row["solver"] for row in record["settings"])
    for solver, colour in zip(solvers, COLOURS * 3, strict=False):
        rows = sorted(
            (row for row in record["settings"] if row["solver"] == solver),
            key=lambda row: row["evaluations"],
        )
        cost = [row["evaluations"] for row in rows]
        mean = [fmean(row["values"][name]) for row in rows]
        error = [spread(row["values"][name]) or 0.0 for row in rows]
        axis.errorbar(cost, mean, error, color=colour, marker="o", ms=3, lw=1.3, label=solver)
    values = [v for row in record["settings"] for v in row["values"][name]]
    axis.set_xscale("log")
    ticks = _apart(sorted({row["evaluations"] for row in record["settings"]}))
    axis.set_xticks(ticks, [str(t) for t in ticks])
    if min(values) > 0 and max(values) > 2 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(plain.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(plain.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()
    axis.grid(color="#e6e9ed", lw=0.6)
    axis.set_xlabel("evaluations", fontsize=8)
    choice = record["recommended"]
    if choice and choice["metric"] == name:
        axis.plot(
            choice["evaluations"],
            choice["value"],
            "*",
            ms=12,
            color="#b03a48",
            label="cheapest good",
        )


def _dots(axis: Any, record: Record, name: str) -> None:
    values = record["settings"][0]["values"][name]
    axis.plot(range(len(values)), values, "o", color=COLOURS[0], label="seeds")
    axis.axhline(fmean(values), color=COLOURS[0], lw=1, label="mean")
    axis.set_xticks(range(len(values)), [str(i) for i in range(len(values))])
    axis.set_xlabel("seed", fontsize=8)
    axis.margins(x=0.4, y=0.3)
