"""Routes on meshes and the loads that they put on links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.topology.mesh import Mesh, MeshLink, Site
from lightning_tieroffload.topology.mesh_sources import grid_mesh
from lightning_tieroffload.topology.routing import route


def grid(width=4, height=4, missing=()):
    return grid_mesh("g", width, height, dram_nbytes=1, link_bytes_per_s=100.0, missing=missing)


def places(mesh, path):
    """Coordinates that a path visits, start included."""
    sites = [mesh.links[path[0]].source, *(mesh.links[number].target for number in path)]
    return [(mesh.sites[number].x, mesh.sites[number].y) for number in sites]


def test_dimension_order_goes_along_x_first():
    mesh = grid()
    at = {(site.x, site.y): number for number, site in enumerate(mesh.sites)}
    loads, paths = route(mesh, [(at[0, 0], at[2, 1], 50.0)])
    assert places(mesh, paths[0]) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert loads.hop_nbytes == 150.0
    assert sorted(loads.nbytes[loads.nbytes > 0]) == [50.0] * 3
    assert loads.busiest_s == 0.5
    back, paths = route(mesh, [(at[2, 1], at[0, 0], 50.0)])
    assert places(mesh, paths[0]) == [(2, 1), (1, 1), (0, 1), (0, 0)]
    # Directions are links of their own.
    assert (loads + back).busiest_s == 0.5


def test_dimension_order_goes_around_missing_dies():
    mesh = grid(3, 2, missing=[(1, 0)])
    loads, paths = route(mesh, [(0, 1, 10.0)])
    assert places(mesh, paths[0]) == [(0, 0), (0, 1), (1, 1), (2, 1), (2, 0)]
    assert loads.hop_nbytes == 40.0


def test_hop_bytes_are_distance_times_bytes():
    """On a full grid a dimension-ordered route is a shortest one: routing and global cost agree."""
    mesh = grid(5, 3)
    rng = np.random.default_rng(0)
    messages = [
        (int(a), int(b), float(n))
        for a, b, n in zip(*rng.integers(0, 15, (2, 40)), rng.integers(1, 99, 40), strict=True)
    ]
    loads, paths = route(mesh, messages)
    table = mesh.distance_table()
    assert loads.hop_nbytes == pytest.approx(sum(table[a, b] * n for a, b, n in messages))
    assert [len(path) for path in paths] == [table[a, b] for a, b, _ in messages]


def test_congestion_avoiding_spreads_and_is_never_busier():
    mesh = grid()
    gained = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        messages = [
            (int(a), int(b), float(n))
            for a, b, n in zip(*rng.integers(0, 16, (2, 30)), rng.integers(1, 99, 30), strict=True)
        ]
        straight, _ = route(mesh, messages, "dimension")
        spread, paths = route(mesh, messages, "congestion")
        assert spread.busiest_s <= straight.busiest_s
        gained += spread.busiest_s < 0.9 * straight.busiest_s
        for (source, target, _), path in zip(messages, paths, strict=True):
            if source != target:
                assert mesh.links[path[0]].source == source
                assert mesh.links[path[-1]].target == target
                for a, b in itertools.pairwise(path):
                    assert mesh.links[a].target == mesh.links[b].source
    assert gained >= 10


def test_congestion_avoiding_is_shortest_on_an_empty_mesh():
    mesh = grid()
    table = mesh.distance_table()
    for target in range(16):
        _, paths = route(mesh, [(5, target, 7.0)], "congestion")
        assert len(paths[0]) == table[5, target]


def test_booked_traffic_is_kept_out_of_the_way_of():
    mesh = grid(3, 2)
    booked, _ = route(mesh, [(0, 2, 1000.0)])  # along the top row
    loads, paths = route(mesh, [(0, 2, 10.0)], "congestion", booked=booked)
    assert places(mesh, paths[0])[1] == (0, 1)
    assert loads.hop_nbytes == 40.0  # a detour of two hops, and booked bytes are not counted again
    _, direct = route(mesh, [(0, 2, 10.0)], "congestion")
    assert len(direct[0]) == 2


def test_utilisation():
    mesh = grid(2, 1)
    loads, _ = route(mesh, [(0, 1, 30.0), (0, 1, 20.0)])
    assert loads.peak_and_mean(1.0) == (0.5, 0.25)
    assert loads.utilisation(2.0).tolist() == [0.25, 0.0]
    with pytest.raises(ConfigError, match="period_s=0 must be more than 0"):
        loads.utilisation(0)
    lonely = Mesh("one", (Site(name="a", x=0, y=0),), ())
    assert route(lonely, [(0, 0, 5.0)])[0].peak_and_mean(1.0) == (0.0, 0.0)


def test_faults():
    mesh = grid(2, 1)
    with pytest.raises(ConfigError, match='"dimension" or "congestion"'):
        route(mesh, [], "fast")
    with pytest.raises(ConfigError, match="does not lead from one of 2 sites"):
        route(mesh, [(0, 2, 5.0)])
    oneway = Mesh("m", (Site(name="a", x=0, y=0), Site(name="b", x=1, y=0)), (MeshLink(0, 1, 1.0),))
    with pytest.raises(ConfigError, match="no path from 'b' to 'a'"):
        route(oneway, [(1, 0, 5.0)])
