"""Results as one picture: throughput beside torch, and memory. Reads the record only."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import TITLES
from benchmarks.record import Record, cases_of, machine_line, row_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STOKER, PALE, SPDL, TORCH = "#c8553d", "#e9b8a9", "#588b8b", "#a8a8a8"
INK, MUTED = "#2b2b2b", "#757575"
SERIES = (
    ("stoker", "read", STOKER, "Stoker"),
    ("stoker", "copy", PALE, "Stoker, the consumer copies each batch, as pinning does"),
    ("spdl", "read", SPDL, "SPDL, threads"),
)
BAR_INCHES, PANEL_INCHES = 0.19, 1.0


def draw(record: Record, path: Path) -> None:
    """Write the picture; panels without results are left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    speed = [case for case in cases_of(record, "throughput") if case["rows"]]
    memory = [case for case in cases_of(record, "memory") if case["rows"]]
    panels = [(_draw_throughput, speed, 3.6 * len(speed)), (_draw_memory, memory, 7.5)]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return
    heights = [PANEL_INCHES + BAR_INCHES * bars for _, _, bars in panels]
    style: Any = {"font.size": 9, "axes.edgecolor": "#c4c4c4", "text.color": INK}
    style |= {"xtick.labelsize": 8, "ytick.labelsize": 8.5, "ytick.labelcolor": INK}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(panels),
            1,
            figsize=(9.5, sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for (paint, cases, _), ax in zip(panels, axes[:, 0], strict=True):
            ax.spines[["top", "right", "left"]].set_visible(False)
            ax.tick_params(axis="both", length=0)
            ax.grid(axis="x", color="#ececec")
            ax.set_axisbelow(True)
            paint(ax, cases)
        figure.supxlabel(textwrap.fill(machine_line(record), 120), fontsize=6.5, color=MUTED)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _draw_throughput(ax: Axes, cases: list[dict[str, Any]]) -> None:
    height = 1 / 3.6
    for number, case in enumerate(cases):
        for place, (contender, variant, colour, label) in enumerate(SERIES):
            row = row_of(case, contender, variant)
            if row is None or row["ratio"] is None:
                continue
            ratio, y = row["ratio"], number + (place - 1) * height
            ax.barh(y, ratio["median"], height * 0.9, color=colour, label=label)
            _whisker(ax, ratio, y)
            _write(ax, ratio["high"], y, _times(ratio["median"]), bold=place == 0)
        goal = _goal(case)
        if goal is not None:
            ends = (number - 1.5 * height, number - 0.5 * height)
            ax.plot(
                [goal, goal],
                ends,
                color=INK,
                lw=2.2,
                solid_capstyle="butt",
                label="target",
                zorder=4,
            )
    ax.axvline(1.0, color=MUTED, lw=1.0, ls="--", zorder=0.9)
    ax.set_yticks(range(len(cases)), [_wrapped(case["title"]) for case in cases])
    ax.set_ylim(len(cases) - 0.5, -0.6)
    ax.set_xlim(left=0)
    ax.margins(x=0.06)
    ax.set_xlabel("samples per second; torch.utils.data.DataLoader = 1", size=8, color=MUTED)
    title = "Throughput of the loader alone (median of paired rounds, 95 % interval)"
    ax.set_title(title, loc="left", weight="bold", size=10.5, pad=22)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    order = [label for *_, label in SERIES if label in unique]
    order += [label for label in unique if label not in order]
    entries = [unique[label] for label in order]
    ax.legend(
        entries,
        order,
        fontsize=7.5,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.012, 0.985),
        ncols=len(order),
        columnspacing=1.2,
        handlelength=1.2,
    )


def _draw_memory(ax: Axes, cases: list[dict[str, Any]]) -> None:
    colours = {"torch": TORCH, "spdl": SPDL, "stoker": STOKER, "stoker_bounded": PALE}
    rows = [row for row in cases[0]["rows"] if row["variant"] == "added"]
    for number, row in enumerate(rows):
        value, contender = row["value"], row["contender"]
        ax.barh(number, value["median"], 0.62, color=colours[contender])
        _whisker(ax, value, number)
        text = f"{value['median']:,.0f} MB"
        if row["ratio"] and contender != "torch":
            text += f", {row['ratio']['median']:.2f} of torch"
        _write(ax, value["high"], number, text, bold=contender == "stoker")
        if contender == "torch":
            half = value["median"] / 2
            ax.plot([half, half], [-0.5, len(rows) - 0.5], color=INK, lw=1.4, ls=":")
            ax.text(half, -0.52, "target: half of torch", size=7, ha="center", va="bottom")
    ax.set_yticks(range(len(rows)), [TITLES[row["contender"]] for row in rows])
    ax.set_ylim(len(rows) - 0.5, -1.0)
    ax.margins(x=0.2)
    ax.set_xlim(left=0)
    label = "MB above interpreter and dataset: peak of the whole process tree"
    ax.set_xlabel(label, size=8, color=MUTED)
    ax.set_title(cases[0]["title"], loc="left", weight="bold", size=10.5)


def _whisker(ax: Axes, value: dict[str, float], y: float) -> None:
    reach = [[value["median"] - value["low"]], [value["high"] - value["median"]]]
    ax.errorbar(value["median"], y, xerr=reach, color=INK, capsize=1.8, lw=0.8)


def _write(ax: Axes, x: float, y: float, text: str, *, bold: bool) -> None:
    from matplotlib.patheffects import withStroke

    ax.annotate(
        text,
        (x, y),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        size=8 if bold else 7,
        weight="bold" if bold else "normal",
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def _wrapped(title: str) -> str:
    """A long title on two lines, broken at the comma nearest to its middle."""
    commas = [place for place, letter in enumerate(title) if letter == ","]
    if len(title) < 30 or not commas:
        return title
    middle = min(commas, key=lambda place: abs(place - len(title) / 2))
    return f"{title[: middle + 1]}\n{title[middle + 2 :]}"


def _goal(case: dict[str, Any]) -> float | None:
    """The ratio that the case's target names; 1 where it only asks to be ahead."""
    for target in case["targets"]:
        if target["text"].endswith("x torch"):
            return float(target["text"].split()[-2].removesuffix("x"))
    return None
