"""Floor 7. `tieroffload topology`: show a mesh, allocate borrowed DRAM on it, optimise a placement, look at its links.

Translation only: reads options, calls the topology package, prints a table or JSON, draws a picture on request. A MESH
argument is a mesh file (configs/mesh_*.toml) or "host", the machine that this runs on. Figures about a model on a mesh
come from a simulation and say so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_tieroffload.errors import ConfigError, TierOffloadError
from lightning_tieroffload.sizes import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from lightning_tieroffload.topology.mesh import Mesh
    from lightning_tieroffload.topology.study import Outcome, Study

__all__ = ["app", "main", "topology"]

app = typer.Typer(
    help="Where memory is borrowed from, and what the distance costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
topology = app  # the name under which the parent command looks for it

# What a site keeps free: it is neither lent nor used.
MIN_FREE_FRAC = 0.05

MeshArgument = Annotated[str, typer.Argument(help='A mesh file (TOML), or "host" for this machine.', metavar="MESH")]
NeedOption = Annotated[
    list[str] | None,
    typer.Option("--need", help="Bytes that a site needs, SITE=SIZE (die-0-0=60GB); repeat. Others need nothing."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="A model whose pipeline stages are placed instead.")]
TensorParallelOption = Annotated[int, typer.Option(help="Dies in a row that share one stage.")]
NumStagesOption = Annotated[int | None, typer.Option(help="Pipeline stages; as many as fit if left out.")]
MicroBatchOption = Annotated[int | None, typer.Option(help="Sequences per micro-batch; as many as fit if left out.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PngOption = Annotated[Path | None, typer.Option("--png", help="Also draw a picture there.")]


@app.command()
def show(mesh: MeshArgument = "host", as_json: JsonOption = False, png: PngOption = None) -> None:
    """Sites, links and distances of a mesh, or of this machine."""
    place = _mesh(mesh)
    if as_json:
        _print_json(_mesh_json(place))
    else:
        _print_mesh(place)
    if png is not None:
        from lightning_tieroffload.topology.picture import Panel, draw_mesh

        top = max((link.bytes_per_s for link in place.links), default=1.0)
        labels = [
            f"{site.name}\n{format_nbytes(site.dram_nbytes) if site.dram_nbytes else site.kind}" for site in place.sites
        ]
        draw_mesh(
            png,
            Panel(place, labels=labels, title=f"{place.name}: {len(place.sites)} sites, {format_nbytes(top)}/s links"),
        )


@app.command()
def allocate(
    mesh: MeshArgument,
    need: NeedOption = None,
    model: ModelOption = None,
    order: Annotated[
        str, typer.Option(help="nearest (published) or regret (better order and an exchange pass).")
    ] = "regret",
    tensor_parallel: TensorParallelOption = 4,
    num_stages: NumStagesOption = None,
    micro_batch: MicroBatchOption = None,
    as_json: JsonOption = False,
    png: PngOption = None,
) -> None:
    """Borrow DRAM for sites that overflow, near ones first, and say how far from the optimum that is."""
    place = _mesh(mesh)
    if _one_of(need, model) == "model":
        study = _study(place, model, tensor_parallel, num_stages, micro_batch, ("none", order))
        _report_study(study, as_json)
        if png is not None:
            _draw_study(png, study)
        return
    answer, flows, used = _allocate_needs(place, need or [], order)
    if as_json:
        _print_json(answer)
    else:
        names = [site.name for site in place.sites]
        _print_table(
            ("sender", "helper", "borrowed", "hops"),
            [
                (names[f.sender], names[f.helper], format_nbytes(f.nbytes), f"{row['distance']:g}")
                for f, row in zip(flows, answer["flows"], strict=True)
            ],
        )
        typer.echo(
            f"{format_nbytes(answer['borrowed_nbytes'])} borrowed, order {order}: global cost "
            f"{answer['global_cost_s']:.4g} s of link time, {answer['optimum_gap_frac']:.2%} above the optimum "
            f"(nearest: {answer['nearest_gap_frac']:.2%})."
        )
    if png is not None:
        from lightning_tieroffload.topology.picture import Panel, draw_mesh

        draw_mesh(png, Panel(place, site_frac=used, flows=flows, title=f"{place.name}: borrowed DRAM, {order}"))


@app.command()
def optimise(
    mesh: MeshArgument,
    model: Annotated[str, typer.Option("--model", help="The model whose pipeline stages are placed.")] = "llama2-30b",
    tensor_parallel: TensorParallelOption = 4,
    num_stages: NumStagesOption = None,
    micro_batch: MicroBatchOption = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same placement.")] = 0,
    population: Annotated[int, typer.Option(help="Individuals per generation; 20 to 50 works well.")] = 50,
    generations: Annotated[int, typer.Option(help="Most generations over all restarts.")] = 2000,
    as_json: JsonOption = False,
    png: PngOption = None,
    history_png: Annotated[Path | None, typer.Option(help="Also draw cost over generations there.")] = None,
) -> None:
    """Place a model's stages: no borrowing, greedy and genetic side by side (a simulation)."""
    from lightning_tieroffload.topology.study import VARIANTS

    study = _study(
        _mesh(mesh), model, tensor_parallel, num_stages, micro_batch, VARIANTS, seed, population, generations
    )
    _report_study(study, as_json)
    if png is not None:
        _draw_study(png, study)
    if history_png is not None:
        from lightning_tieroffload.topology.picture import draw_history

        if study.optimised is None:
            raise ConfigError("--history-png: nothing was optimised, the stages do not fit on this mesh.")
        draw_history(history_png, {f"{model} on {study.mesh.name}": study.optimised.history})


@app.command()
def links(
    mesh: MeshArgument,
    need: NeedOption = None,
    model: ModelOption = None,
    variant: Annotated[str, typer.Option(help="With --model: none, nearest, regret, placed or genetic.")] = "regret",
    tensor_parallel: TensorParallelOption = 4,
    num_stages: NumStagesOption = None,
    micro_batch: MicroBatchOption = None,
    top: Annotated[int, typer.Option(min=0, help="Print this many of the busiest links.")] = 10,
    as_json: JsonOption = False,
    png: PngOption = None,
) -> None:
    """How busy each link is: pipeline and balancing traffic, routed apart; peak and mean."""
    from lightning_tieroffload.topology.picture import Panel, draw_panels

    place = _mesh(mesh)
    if _one_of(need, model) == "model":
        study = _study(place, model, tensor_parallel, num_stages, micro_batch, (variant,))
        outcome = study.outcome(variant)
        kinds = {"pipeline": outcome.pipeline_loads, "balancing": outcome.balancing_loads}
        period_s = outcome.slot_s
        dram_frac = outcome.used_nbytes / study.capacity_nbytes
        flows = outcome.flows
        what = f"{study.model.name} on {place.name}, {variant} (simulated)"
    else:
        from lightning_tieroffload.topology.routing import Message, route

        _, flows, dram_frac = _allocate_needs(place, need or [], "regret")
        messages = [Message(flow.sender, flow.helper, flow.nbytes) for flow in flows]
        kinds = {routing: route(place, messages, routing)[0] for routing in ("dimension", "congestion")}
        # Two routes of the same bytes: busy fractions are of the time that the busier way needs.
        period_s = max(loads.busiest_s for loads in kinds.values()) or 1.0
        what = f"borrowed bytes on {place.name}"
    rows: list[dict[str, Any]] = []
    for number, link in enumerate(place.links):
        busy = {kind: float(loads.seconds[number] / period_s) for kind, loads in kinds.items()}
        ends = {"from": place.sites[link.source].name, "to": place.sites[link.target].name}
        rows.append({**ends, "bytes_per_s": link.bytes_per_s, **{f"{kind}_frac": frac for kind, frac in busy.items()}})
    summary = {
        kind: dict(zip(("peak_frac", "mean_frac"), loads.peak_and_mean(period_s), strict=True))
        for kind, loads in kinds.items()
    }
    if as_json:
        _print_json(
            {"what": what, "period_s": period_s, "summary": summary, "links": rows, "simulated": model is not None}
        )
    else:
        typer.echo(f"{what}; busy fractions of a period of {period_s:.4g} s")
        rows.sort(key=lambda row: -sum(row[f"{kind}_frac"] for kind in kinds))
        _print_table(
            ("from", "to", "GB/s", *kinds),
            [
                (
                    row["from"],
                    row["to"],
                    f"{row['bytes_per_s'] / 1e9:.0f}",
                    *(f"{row[f'{kind}_frac']:.2%}" for kind in kinds),
                )
                for row in rows[:top]
            ],
        )
        for kind, figures in summary.items():
            typer.echo(
                f"{kind}: peak {figures['peak_frac']:.2%}, mean {figures['mean_frac']:.2%} over {len(rows)} links"
            )
    if png is not None:
        panels = [
            Panel(
                place,
                site_frac=dram_frac,
                link_frac=loads.utilisation(period_s),
                flows=flows if kind == "balancing" else (),
                title=f"{what}: {kind}",
            )
            for kind, loads in kinds.items()
        ]
        draw_panels(png, panels)


# Work shared by the commands


def _mesh(name: str) -> Mesh:
    from lightning_tieroffload.topology.mesh_sources import mesh_of_host, read_mesh

    if name == "host":
        from lightning_tieroffload.topology.host import read_host

        return mesh_of_host(read_host())
    return read_mesh(name)


def _one_of(need: Sequence[str] | None, model: str | None) -> str:
    if bool(need) == bool(model):
        raise ConfigError("say what overflows: either --need SITE=SIZE (repeat it) or --model NAME, not both.")
    return "model" if model else "need"


def _allocate_needs(place: Mesh, needs: Sequence[str], order: str) -> tuple[dict[str, Any], list[Any], Any]:
    import numpy as np

    from lightning_tieroffload.topology.allocator import allocate_by_distance
    from lightning_tieroffload.topology.exact import transport_optimum_by_distance
    from lightning_tieroffload.topology.flows import Flow

    wanted = [0] * len(place.sites)
    for item in needs:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--need {item}: write SITE=SIZE, for instance --need die-0-0=60GB.")
        wanted[place.index_of(name)] += parse_nbytes(value, key=f"--need {name}")
    usable = [int(site.dram_nbytes * (1 - MIN_FREE_FRAC)) for site in place.sites]
    senders = [number for number in range(len(wanted)) if wanted[number] > usable[number]]
    helpers = [number for number in range(len(wanted)) if wanted[number] < usable[number]]
    demand = np.array([wanted[number] - usable[number] for number in senders], np.int64)
    supply = np.array([usable[number] - wanted[number] for number in helpers], np.int64)
    table = place.distance_table()[np.ix_(senders, helpers)]
    speed = place.link_bytes_per_s()
    chosen = allocate_by_distance(table, demand, supply, order, link_bandwidth_bytes_per_s=speed)  # type: ignore[arg-type]
    nearest = allocate_by_distance(table, demand, supply, "nearest", link_bandwidth_bytes_per_s=speed)
    optimum = transport_optimum_by_distance(table, demand, supply, link_bandwidth_bytes_per_s=speed)
    flows = [Flow(senders[f.sender], helpers[f.helper], f.nbytes) for f in chosen.flows]
    used = np.array(wanted, np.float64)
    for flow in flows:
        used[flow.sender] -= flow.nbytes
        used[flow.helper] += flow.nbytes
    capacity = np.array([site.dram_nbytes for site in place.sites], np.float64)
    used_frac = np.divide(used, capacity, out=np.zeros_like(used), where=capacity > 0)
    floor = optimum.global_cost
    answer = {
        "mesh": place.name,
        "order": order,
        "borrowed_nbytes": chosen.total_nbytes,
        "global_cost_s": chosen.global_cost,
        "optimum_cost_s": floor,
        "optimum_gap_frac": chosen.global_cost / floor - 1 if floor else 0.0,
        "nearest_gap_frac": nearest.global_cost / floor - 1 if floor else 0.0,
        "mean_distance": chosen.mean_distance,
        "flows": [
            {
                "sender": place.sites[f.sender].name,
                "helper": place.sites[f.helper].name,
                "nbytes": f.nbytes,
                "distance": distance,
            }
            for f, distance in zip(flows, chosen.distances, strict=True)
        ],
    }
    return answer, flows, used_frac


def _study(
    place: Mesh,
    model: str | None,
    tensor_parallel: int,
    num_stages: int | None,
    micro_batch: int | None,
    variants: Sequence[str],
    seed: int = 0,
    population: int = 50,
    num_generations: int = 2000,
) -> Study:
    from lightning_tieroffload.topology.pipeline import model_spec
    from lightning_tieroffload.topology.study import run_study

    return run_study(
        place,
        model_spec(model or ""),
        tensor_parallel=tensor_parallel,
        num_stages=num_stages,
        micro_batch=micro_batch,
        variants=variants,
        seed=seed,
        population=population,
        num_generations=num_generations,
    )


def _report_study(study: Study, as_json: bool) -> None:
    from lightning_tieroffload.topology.study import study_table

    rows = study_table(study)
    if as_json:
        for row, outcome in zip(rows, study.outcomes, strict=True):
            row["positions"] = [[study.mesh.sites[s].name for s in study.groups[p]] for p in outcome.positions]
            row["recompute"] = [int(bit) for bit in outcome.recompute]
            row["flows"] = [
                {
                    "sender": study.mesh.sites[flow.sender].name,
                    "helper": study.mesh.sites[flow.helper].name,
                    "nbytes": flow.nbytes,
                }
                for flow in outcome.flows
            ]
        _print_json({"outcomes": rows, "simulated": True})
        return
    typer.echo(
        f"{study.model.name} on {study.mesh.name} (simulated): {study.num_stages} stages of {study.tensor_parallel} "
        f"dies, micro-batch {study.micro_batch}; without borrowing or recompute the fullest die needs "
        f"{format_nbytes(study.overflow_peak_nbytes)} of {format_nbytes(study.capacity_nbytes)}"
    )
    _print_table(
        (
            "variant", "fits", "recompute", "peak/die", "lowered", "DRAM used", "borrowed", "global cost s",
            "gap to LP", "tokens/s", "link peak", "mean",
        ),
        [
            (
                row["variant"],
                "yes" if row["fits"] else "no",
                str(row["num_recompute_bits"]),
                format_nbytes(row["peak_nbytes"]),
                f"{row['lowered_frac']:.1%}",
                f"{row['dram_used_frac']:.1%}",
                format_nbytes(row["borrowed_nbytes"]),
                f"{row['global_cost_s']:.4g}",
                f"{row['optimum_gap_frac']:.2%}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['peak_link_frac']:.2%}",
                f"{row['mean_link_frac']:.2%}",
            )
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        if row["reason"]:
            typer.echo(f"{row['variant']}: {row['reason']}")


def _draw_study(png: Path, study: Study) -> None:
    from lightning_tieroffload.topology.picture import Panel, draw_panels

    def labels(outcome: Outcome) -> list[str]:
        out = [""] * len(study.mesh.sites)
        for stage, position in enumerate(outcome.positions):
            for site in study.groups[position]:
                out[site] = f"s{stage}"
        return out

    panels = []
    first = study.outcomes[0]
    raw = [0.0] * len(study.mesh.sites)
    for need, group in zip(study.needs, study.groups, strict=False):
        for site in group:
            raw[site] = need.nbytes / study.capacity_nbytes
    serpentine = [""] * len(study.mesh.sites)
    for stage, group in zip(range(study.num_stages), study.groups, strict=False):
        for site in group:
            serpentine[site] = f"s{stage}"
    panels.append(
        Panel(
            study.mesh, site_frac=raw, labels=serpentine, title=f"{study.model.name} on {study.mesh.name}: need per die"
        )
    )
    for outcome in study.outcomes:
        if outcome is first and outcome.variant == "none":
            continue
        together = outcome.pipeline_loads + outcome.balancing_loads
        panels.append(
            Panel(
                study.mesh,
                site_frac=outcome.used_nbytes / study.capacity_nbytes,
                labels=labels(outcome),
                link_frac=together.utilisation(outcome.slot_s),
                flows=outcome.flows,
                title=f"{outcome.variant} (simulated): peak {format_nbytes(outcome.peak_nbytes)}, "
                f"cost {outcome.global_cost_s:.3g} s",
            )
        )
    draw_panels(png, panels)


def _mesh_json(place: Mesh) -> dict[str, Any]:
    return {
        "name": place.name,
        "bandwidths_assumed": place.distances is not None,  # a live host: sysfs states distances, no rates
        "sites": [
            {
                "name": site.name,
                "kind": site.kind,
                "x": site.x,
                "y": site.y,
                "dram_nbytes": site.dram_nbytes,
                "compute_flops_per_s": site.compute_flops_per_s,
            }
            for site in place.sites
        ],
        "links": [
            {
                "from": place.sites[link.source].name,
                "to": place.sites[link.target].name,
                "bytes_per_s": link.bytes_per_s,
                "latency_s": link.latency_s,
            }
            for link in place.links
        ],
        "distances": [[float(value) for value in row] for row in place.distance_table()],
    }


def _print_mesh(place: Mesh) -> None:
    speeds = sorted({link.bytes_per_s for link in place.links})
    rates = f"{format_nbytes(speeds[0])}/s to {format_nbytes(speeds[-1])}/s" if speeds else "none"
    assumed = ", assumed: sysfs states distances and no rates" if place.distances is not None else ""
    typer.echo(f"{place.name}: {len(place.sites)} sites, {len(place.links)} directed links ({rates}{assumed})")
    _print_table(
        ("site", "kind", "x", "y", "DRAM", "TFLOP/s"),
        [
            (s.name, s.kind, str(s.x), str(s.y), format_nbytes(s.dram_nbytes), f"{s.compute_flops_per_s / 1e12:g}")
            for s in place.sites
        ],
    )
    table = place.distance_table()
    if len(place.sites) <= 16:
        _print_table(
            ("distance", *(site.name for site in place.sites)),
            [(site.name, *(f"{value:g}" for value in row)) for site, row in zip(place.sites, table, strict=True)],
        )
    else:
        typer.echo(f"largest distance {float(table.max()):g} hops, mean {float(table.mean()):.3g}")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; our own errors become one message on stderr and exit code 2."""
    try:
        typer.main.get_command(app).main(
            args=None if arguments is None else list(arguments), prog_name="tieroffload topology"
        )
    except TierOffloadError as error:
        typer.echo(f"tieroffload topology: {error}", err=True)
        return 2
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
