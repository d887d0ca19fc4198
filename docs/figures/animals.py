"""Draws docs/figures/animals.png and writes the tables of docs/results/features.md.

python docs/figures/animals.py

Activations of the networks of benchmarks/animals.py, from benchmarks/results/animals: what each one
alone finds of a bird's points, along the network, and what arms of several are worth. A bar is the
mean over draws of images and noises, its line their standard deviation. What has no result yet is
left out.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from style import BLUE, GREY, HERE, INK, ORANGE, plots

ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "animals"
PAGE = HERE.parent / "results" / "features.md"
NOTHING = "No run has ended yet: this page says how it will be measured."
BEGIN, END = "<!-- measured -->", "<!-- end of what was measured -->"
NETWORKS = {"unet": "U-Net", "dit": "DiT"}
ARMS = {
    "legacy": "legacy",
    "all": "all activations",
    "rules": "rules",
    "gate": "gate, half",
    "gate-quarter": "gate, a quarter",
    "rules+gate": "rules, gate",
    "selected": "rules, gate, probe",
}
SCORES = {"eta": "noise", "eta_hi": "fine noise", "kappa": "detail", "position": "place",
          "locality": "locality"}  # fmt: skip
FILTERS = ("rules", "gate", "gate-quarter", "rules+gate")

Record = dict[str, Any]


def main() -> None:
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    shown = {name: title for name, title in NETWORKS.items() if name in found}
    if shown:
        draw(found, shown, HERE / "animals.png")
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    measured = "\n\n".join(sections(found)) or NOTHING
    PAGE.write_text(f"{before}\n\n{measured}\n\n{after}")


# ---------------------------------------------------------------- numbers


def values(record: Record, what: str) -> list[float]:
    """Of all draws and seeds; of PCK, the one per point."""
    return [v[0] if isinstance(v, list) else v for v in record.get(what, [])]


def spell(numbers: Sequence[float], digits: int = 1, scale: float = 100) -> str:
    """The mean, with the standard deviation where there are several."""
    if not numbers:
        return ""
    spread = f" ± {scale * stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{scale * fmean(numbers):.{digits}f}{spread}"


def place(row: Record) -> str:
    """Where in the network, in the groups of the paper's properties."""
    if row["stage"] == "block":
        return f"block {row['block']}"
    return row["stage"] if row["stage"] == "mid" else f"{row['stage']} {row['level']}"


def scored(row: Record, what: str) -> list[float]:
    return [s[what] for s in row["scores"] if s[what] is not None]


def ranking(record: Record, what: str) -> list[str]:
    """Activations, best first."""
    rows = record["activations"]
    return sorted(rows, key=lambda name: -fmean(values(rows[name], what)))


# ---------------------------------------------------------------- tables


def sections(found: dict[str, Record]) -> Iterator[str]:
    shown = {name: title for name, title in NETWORKS.items() if name in found}
    for name, title in shown.items():
        yield f"## {title}: the properties"
        yield about(found[name])
        both = [found[n] for n in (name, f"{name}-random") if n in found]
        yield properties(both)
        yield summary_of_properties(both)
    if not shown:
        return
    yield "## What activations are worth, together"
    yield (
        "PCK@0.1 by the box, per point and per image, and mean IoU from 30 labelled pets, in "
        "percent: mean and standard deviation over draws of images and noises."
    )
    yield arms(found, shown)
    yield "![Every activation alone, and arms of several](../figures/animals.png)"
    yield "## Does the gate keep the best?"
    yield (
        "Kept, of all activations; the rank, among all, of the best that is kept; and what that "
        "one is worth beside the best of all. The same filter for both tasks; one draw a column "
        "entry."
    )
    yield kept(found, shown)
    yield "## Matches"
    for name, title in shown.items():
        picture = RESULTS / f"{name}.png"
        if picture.exists():
            link = Path("../..") / picture.relative_to(ROOT)
            yield f"![{title}: matches of the selected activations]({link})"


def about(record: Record) -> str:
    levels = ", ".join(f"{spell([v])} at {level}" for level, v in record["levels"].items())
    size = f"{record['parameters'] / 1e6:.1f}M parameters, " if "parameters" in record else ""
    return (
        f"{size}{len(record['activations'])} activations. Noise level {record['sigma']:g}, chosen "
        f"by the PCK of all together on pairs of training birds: {levels}."
    )


def properties(both: Sequence[Record]) -> str:
    """Means by place, self-attention's queries and keys apart; trained / random."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in both[0]["activations"].items():
        of_self = "self q, k" if row["kind"] in ("self-q", "self-k") else "others"
        groups.setdefault((place(row), of_self), []).append(name)
    lines = ["| where | which |" + "".join(f" {title} |" for title in SCORES.values())]
    lines += ["|---|---|" + "---|" * len(SCORES)]
    for (where, which), names in groups.items():
        cells = (" / ".join(mean_score(r, names, score) for r in both) for score in SCORES)
        lines.append(f"| {where} | {which} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(lines)


def mean_score(record: Record, names: Sequence[str], what: str) -> str:
    found = [v for name in names for v in scored(record["activations"][name], what)]
    return f"{fmean(found):.3f}" if found else "-"


def summary_of_properties(both: Sequence[Record]) -> str:
    """The paper's three, each in a number for each network; trained / random."""
    lines = ["| | " + " | ".join(("trained", "random")[: len(both)]) + " |"]
    lines += ["|---|" + "---|" * len(both)]
    if "asymmetry" in both[0]:
        cells = (spell(r["asymmetry"], 2, 1) for r in both)
        lines.append("| noise on the way down / early up | " + " | ".join(cells) + " |")
    cells = (spread_of_noise(r) for r in both)
    lines.append("| noise, largest / smallest place | " + " | ".join(cells) + " |")
    for scale in both[0]["granularity_change"][0]:
        cells = (spell([c[scale] for c in r["granularity_change"]], 3, 1) for r in both)
        lines.append(f"| change of detail at {scale} of the size | " + " | ".join(cells) + " |")
    cells = (locality_gap(r) for r in both)
    lines.append("| locality of self q, k beyond others | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread_of_noise(record: Record) -> str:
    found: list[float] = []
    rows = record["activations"].values()
    for draw in range(len(next(iter(rows))["scores"])):
        places: dict[str, list[float]] = {}
        for row in rows:
            places.setdefault(place(row), []).append(row["scores"][draw]["eta"])
        means = [fmean(v) for v in places.values()]
        found.append(max(means) / min(means))
    return spell(found, 2, 1)


def locality_gap(record: Record) -> str:
    rows = record["activations"].values()
    found: list[float] = []
    for draw in range(len(next(iter(rows))["scores"])):
        groups: dict[bool, list[float]] = {True: [], False: []}
        for row in rows:
            if (value := row["scores"][draw]["locality"]) is not None:
                groups[row["kind"] in ("self-q", "self-k")].append(value)
        if groups[True] and groups[False]:
            found.append(fmean(groups[True]) - fmean(groups[False]))
    return spell(found, 3, 1)


def arms(found: dict[str, Record], shown: dict[str, str]) -> str:
    lines = ["| network | arm | activations | per point | per image | mIoU |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, title in shown.items():
        for key, words in ((name, title), (f"{name}-random", f"{title}, random")):
            if key in found:
                lines += arm_lines(found[key], words)
    for arm, record in found.get("baselines", {}).get("arms", {}).items():
        lines.append(f"| | {arm} | | {pck_cells(record)} | {spell(values(record, 'iou'))} |")
    return "\n".join(lines)


def arm_lines(record: Record, words: str) -> Iterator[str]:
    best = ranking(record, "pck")[0]
    row = record["activations"][best]
    yield f"| {words} | best alone on birds: `{best}` | 1 | {pck_cells(row)} | |"
    for arm, title in ARMS.items():
        here = record["arms"][arm]
        ids = [len(i) for key in ("ids", "ids on birds", "ids on pets") for i in here.get(key, [])]
        count = str(ids[0]) if min(ids) == max(ids) else f"{min(ids)} to {max(ids)}"
        iou = spell(values(here, "iou"))
        yield f"| {words} | {title} | {count} | {pck_cells(here)} | {iou} |"


def pck_cells(record: Record) -> str:
    return " | ".join(spell([v[n] for v in record["pck"]]) for n in (0, 1))


def kept(found: dict[str, Record], shown: dict[str, str]) -> str:
    lines = ["| network | task | filter | kept | rank of the best kept | it, and the best of all |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, title in shown.items():
        record = found[name]
        for what, task in (("pck", "birds, PCK"), ("accuracy", "pets, pixels right")):
            for arm in FILTERS:
                cells = kept_cells(record, what, record["arms"][arm]["ids"])
                lines.append(f"| {title} | {task} | {ARMS[arm]} | {cells} |")
    return "\n".join(lines)


def kept_cells(record: Record, what: str, left: Sequence[Sequence[str]]) -> str:
    order, rows = ranking(record, what), record["activations"]
    ranks = [min(order.index(name) for name in ids) for ids in left]  # one for each draw
    best = spell([fmean(values(rows[order[0]], what))])
    theirs = [spell([fmean(values(rows[order[rank]], what))]) for rank in ranks]
    counts = [str(len(ids)) for ids in left]
    return (
        f"{once(counts)} of {len(order)} | {once([str(rank + 1) for rank in ranks])} | "
        f"{once(theirs)}, {best}"
    )


def once(words: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(words))


# ---------------------------------------------------------------- figure


def draw(found: dict[str, Record], shown: dict[str, str], target: Path) -> None:
    plt = plots()
    size = (11, 3.4 * len(shown))
    figure, axes = plt.subplots(
        len(shown), 3, figsize=size, squeeze=False, gridspec_kw={"width_ratios": [2.4, 1, 1]}
    )
    for row, (name, title) in zip(axes, shown.items(), strict=True):
        random, base = found.get(f"{name}-random"), found.get("baselines")
        along(row[0], found[name], random)
        row[0].set_title(f"{title}: every activation alone")
        for axis, what, words in zip(
            row[1:], ("pck", "iou"), ("birds, PCK@0.1", "pets, mean IoU"), strict=True
        ):
            bars(axis, found[name], random, base, what)
            axis.set_title(f"{title}: {words}")
        row[2].set_yticklabels([])
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def along(axis: Any, record: Record, random: Record | None) -> None:
    """PCK in the order of computation."""
    rows, names = record["activations"], list(record["activations"])
    left = set(record["arms"]["rules+gate"]["ids"][0])
    chosen = {name for ids in record["arms"]["selected"]["ids on birds"] for name in ids}
    if random is not None:
        other = [100 * fmean(values(random["activations"][name], "pck")) for name in names]
        axis.plot(range(len(names)), other, color=INK, linewidth=0.8, label="random weights")
    groups = {
        "dropped": (GREY, [n for n in names if n not in left]),
        "left by rules and gate": (BLUE, [n for n in names if n in left - chosen]),
        "chosen": (ORANGE, [n for n in names if n in chosen]),
    }
    for label, (colour, some) in groups.items():
        places = [names.index(name) for name in some]
        means = [100 * fmean(values(rows[name], "pck")) for name in some]
        spreads = [100 * deviation(values(rows[name], "pck")) for name in some]
        axis.errorbar(places, means, spreads, fmt="o", markersize=3.5, color=colour, label=label)
    marks = [n for n, name in enumerate(names) if not n or changes(rows, names[n - 1], name)]
    axis.set_xticks(marks, [place(rows[names[n]]) for n in marks], rotation=45, fontsize=7)
    axis.set_ylabel("PCK@0.1 (box), %")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])  # room for the legend
    axis.legend(fontsize=7, ncols=2)


def changes(rows: dict[str, Record], one: str, other: str) -> bool:
    return place(rows[one]) != place(rows[other])


def deviation(numbers: Sequence[float]) -> float:
    return stdev(numbers) if len(numbers) > 1 else 0.0


def bars(axis: Any, record: Record, random: Record | None, base: Record | None, what: str) -> None:
    titles = list(ARMS.values())
    for which, colour, shift in ((random, GREY, 0.2), (record, BLUE, -0.2)):
        if which is not None:
            found = [values(which["arms"][arm], what) for arm in ARMS]
            axis.barh(
                [n + shift for n in range(len(titles))],
                [100 * fmean(v) for v in found],
                0.4,
                xerr=[100 * deviation(v) for v in found],
                color=colour,
                label="trained" if which is record else "random weights",
            )
    for (arm, other), line in zip(
        (base or {"arms": {}})["arms"].items(), (":", "--"), strict=False
    ):
        if numbers := values(other, what):
            axis.axvline(100 * fmean(numbers), color=INK, linestyle=line, linewidth=1, label=arm)
    axis.set_yticks(range(len(titles)), titles, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("%")
    axis.legend(fontsize=6, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


if __name__ == "__main__":
    main()
