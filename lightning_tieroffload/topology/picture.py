"""Floor 2. Pictures: a mesh as a heat map with its links and flows, and the optimiser's cost over generations.

matplotlib is asked for only here and only when a picture is wanted; no global figure state is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import TierIOError, UnsupportedError
from lightning_tieroffload.topology.flows import Flow
from lightning_tieroffload.topology.mesh import Mesh

__all__ = ["Panel", "draw_history", "draw_mesh", "draw_panels"]


class Panel:
    """What one picture of a mesh shows. All but the mesh may be left out.

    ``site_frac`` (N,) colours sites, 1 meaning a full DRAM (more than 1 is an overflow and drawn as such);
    ``labels`` (N,) are written into them; ``link_frac`` (L,) colours links by their busy fraction; ``flows`` are drawn
    as arrows from sender to helper.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        title: str = "",
        site_frac: npt.ArrayLike | None = None,
        labels: Sequence[str] | None = None,
        link_frac: npt.ArrayLike | None = None,
        flows: Sequence[Flow] = (),
    ) -> None:
        self.mesh = mesh
        self.title = title or mesh.name
        self.site_frac = None if site_frac is None else np.asarray(site_frac, np.float64)
        self.labels = [site.name for site in mesh.sites] if labels is None else list(labels)
        self.link_frac = None if link_frac is None else np.asarray(link_frac, np.float64)
        self.flows = list(flows)


def draw_mesh(path: str | Path, panel: Panel) -> None:
    """Write one picture of a mesh to ``path`` (PNG)."""
    draw_panels(path, [panel])


def draw_panels(path: str | Path, panels: Sequence[Panel]) -> None:
    """Write several pictures of a mesh side by side, with one colour scale, to ``path`` (PNG).

    Raises ``UnsupportedError`` without matplotlib and ``TierIOError`` if the file cannot be written.
    """
    figure_class = _figure_class()
    width = max(site.x for site in panels[0].mesh.sites) - min(site.x for site in panels[0].mesh.sites) + 1
    height = max(site.y for site in panels[0].mesh.sites) - min(site.y for site in panels[0].mesh.sites) + 1
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    panel_width = max(5.0, 0.9 * width + 1.5)
    panel_height = max(2.5, 0.8 * height + 1.3)
    figure = figure_class(figsize=(columns * panel_width, rows * panel_height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    top = max((float(p.link_frac.max(initial=0.0)) for p in panels if p.link_frac is not None), default=0.0) or 1.0
    for axis, panel in zip(axes, panels, strict=False):
        _draw(figure, axis, panel, top)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    _save(figure, path)


def draw_history(path: str | Path, histories: dict[str, Sequence[float]], *, optimum: float | None = None) -> None:
    """Write best cost over generations, one line per search; ``optimum`` is drawn as the floor."""
    figure = _figure_class()(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for label, history in histories.items():
        axis.plot(np.arange(1, len(history) + 1), history, label=label, linewidth=1.5)
    if optimum is not None:
        axis.axhline(optimum, color="black", linestyle="--", linewidth=1, label="true optimum")
    axis.set_xlabel("generation")
    axis.set_ylabel("t_max * global cost, best so far")
    axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.legend()
    _save(figure, path)


def _draw(figure: Any, axis: Any, panel: Panel, top_link_frac: float) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize
    from matplotlib.patches import FancyArrowPatch, Rectangle

    mesh = panel.mesh
    at = mesh.coordinates().astype(np.float64)
    warm, cool = colormaps["YlOrRd"], colormaps["Blues"]
    if len(mesh.links):
        segments, values = [], []
        for number, link in enumerate(mesh.links):
            a, b = at[link.source], at[link.target]
            way = b - a
            # Two directions side by side, so that each shows its own load.
            side = np.array([-way[1], way[0]]) / max(float(np.hypot(*way)), 1e-9) * 0.07
            segments.append([a + side, b + side])
            values.append(0.0 if panel.link_frac is None else panel.link_frac[number] / top_link_frac)
        strength = np.asarray(values)
        colours = cool(0.25 + 0.75 * strength)
        lines = LineCollection(segments, colors=colours, linewidths=0.8 + 4.0 * strength, zorder=1)
        axis.add_collection(lines)
    for number, (x, y) in enumerate(at):
        frac = None if panel.site_frac is None else float(panel.site_frac[number])
        over = frac is not None and frac > 1.0
        face = "#eeeeee" if frac is None else warm(0.1 + 0.75 * min(frac, 1.0))
        axis.add_patch(
            Rectangle(
                (x - 0.34, y - 0.3), 0.68, 0.6, facecolor=face, edgecolor="#7a0177" if over else "#444444",
                linewidth=2.2 if over else 0.8, zorder=2,
            )
        )  # fmt: skip
        text = panel.labels[number] + ("" if frac is None else f"\n{frac:.0%}")
        dark = frac is not None and frac > 0.75
        axis.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black", zorder=4)
    most = max((flow.nbytes for flow in panel.flows), default=1)
    for flow in panel.flows:
        axis.add_patch(
            FancyArrowPatch(
                tuple(at[flow.sender]), tuple(at[flow.helper]), connectionstyle="arc3,rad=0.18", arrowstyle="-|>",
                mutation_scale=9, shrinkA=13, shrinkB=13, color="#1b7837", alpha=0.75,
                linewidth=0.6 + 2.0 * flow.nbytes / most, zorder=3,
            )
        )  # fmt: skip
    low, high = at.min(0), at.max(0)
    axis.set_xlim(low[0] - 0.6, high[0] + 0.6)
    axis.set_ylim(high[1] + 0.6, low[1] - 0.6)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title(panel.title, fontsize=9)
    if panel.link_frac is not None:
        from matplotlib.cm import ScalarMappable

        scale = ScalarMappable(Normalize(0, 100 * top_link_frac), cool)
        figure.colorbar(scale, ax=axis, fraction=0.03, pad=0.01, label="link busy, % of a period")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("a picture needs matplotlib: pip install matplotlib, or leave out --png.") from error
    return Figure


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise TierIOError(f"cannot write the picture {path}: {error}", errno=error.errno, path=str(path)) from error
