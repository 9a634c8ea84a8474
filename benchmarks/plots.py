"""Figures of the documents: panels of lines side by side in one SVG file (needs matplotlib)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """Points in order; lines of one ``group`` have one colour, those of none each its own."""

    points: Points
    label: str | None = None
    style: str = "o-"
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot; an axis that is not logarithmic begins at zero."""

    lines: Sequence[Line]
    xlabel: str
    ylabel: str | None = None
    title: str | None = None
    has_log_x: bool = True
    has_log_y: bool = False


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write the figure."""
    import matplotlib as mpl  # not needed to measure

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = path.name  # the same figure, the same file
    from matplotlib import pyplot as plt

    figure, row = plt.subplots(1, len(panels), figsize=(9, 3.2), squeeze=False)
    for axes, panel in zip(row[0], panels, strict=True):
        for line in panel.lines:
            x, y = zip(*line.points, strict=True)
            color = None if line.group is None else f"C{line.group}"
            axes.plot(x, y, line.style, color=color, label=line.label, markersize=4)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, title=panel.title)
        if panel.has_log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.set_xlim(left=0)
        if panel.has_log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.0f}")
        else:
            axes.set_ylim(bottom=0)
        if any(line.label for line in panel.lines):
            axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
