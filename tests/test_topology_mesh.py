"""Meshes from files, clusters and hosts; every invalid file is answered by line and field."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.topology.mesh import Mesh, MeshLink, Site
from lightning_tieroffload.topology.mesh_sources import grid_mesh, mesh_of_cluster, parse_mesh, read_mesh

CONFIGS = Path(__file__).parent.parent / "configs"

GRID = """\
name = "small"

[grid]
width = 3
height = 2
dram = "48GB"
compute_tflops = 512
link_bandwidth = "1TB"
"""

SITES = """\
[[site]]
name = "a"
x = 0
y = 0
dram = "1GiB"

[[site]]
name = "b"
x = 1
y = 0

[[site]]
name = "c"
x = 2
y = 0

[[link]]
from = "a"
to = "b"
bandwidth = "10GB"
latency_s = 1e-6

[[link]]
from = "b"
to = "c"
bandwidth = "10GB"
"""


@pytest.mark.parametrize(
    ("file_name", "dram_gb", "d2d_tb_per_s", "tflops"),
    [
        ("mesh_wafer_48g.toml", 48, 4.5, 512),
        ("mesh_wafer_70g.toml", 70, 4.0, 708),
        ("mesh_wafer_96g.toml", 96, 3.5, 708),
    ],
)
def test_published_wafer_configurations(file_name, dram_gb, d2d_tb_per_s, tflops):
    mesh = read_mesh(CONFIGS / file_name)
    assert len(mesh.sites) == 56
    assert {site.dram_nbytes for site in mesh.sites} == {dram_gb * 10**9}
    assert {site.compute_flops_per_s for site in mesh.sites} == {tflops * 1e12}
    assert mesh.link_bytes_per_s() * 4 == d2d_tb_per_s * 1e12
    at = mesh.coordinates()
    assert np.array_equal(mesh.distance_table(), np.abs(at[:, None] - at[None]).sum(-1))


def test_every_mesh_file_of_the_project_reads():
    files = sorted(CONFIGS.glob("mesh_*.toml"))
    assert len(files) >= 4
    for path in files:
        assert read_mesh(path).sites


def test_grid_and_missing_dies():
    mesh = parse_mesh(GRID + "missing = [[1, 0]]\n")
    assert [site.name for site in mesh.sites] == ["die-0-0", "die-2-0", "die-0-1", "die-1-1", "die-2-1"]
    table = mesh.distance_table()
    assert table[0, 1] == 4  # around the gap, where the Manhattan distance is 2
    assert len(mesh.links) == 8


def test_sites_and_links_both_ways():
    mesh = parse_mesh(SITES, file_name="x/line.toml")
    assert mesh.name == "line"
    assert mesh.links[0] == MeshLink(0, 1, 10e9, 1e-6)
    assert mesh.links[1] == MeshLink(1, 0, 10e9, 1e-6)
    assert mesh.sites[0].dram_nbytes == 2**30
    assert mesh.distance_table().tolist() == [[0, 1, 2], [1, 0, 1], [2, 1, 0]]


def test_inline_tables_are_located_too():
    text = 'site = [\n  {name = "a", x = 0, y = 0},\n  {name = "b", x = 0, y = 0},\n]\n'
    text += '[[link]]\nfrom = "a"\nto = "b"\nbandwidth = 1\n'
    with pytest.raises(ConfigError, match=r"m\.toml:3: site\[1\]\.x: coordinate \(0, 0\) of 'b' is that of 'a' too"):
        parse_mesh(text, file_name="m.toml")


# (what is replaced, by what, line, field, a part of the message)
BROKEN_GRIDS = [
    ('dram = "48GB"', 'dram = "-48GB"', 6, "grid.dram", "negative"),
    ('dram = "48GB"', "dram = -1", 6, "grid.dram", "negative"),
    ('dram = "48GB"', 'dram = "48 apples"', 6, "grid.dram", "is not a size"),
    ("width = 3", "width = 0", 4, "grid.width", "between 1 and 1000"),
    ("width = 3", "width = 2.5", 4, "grid.width", "whole number"),
    ("compute_tflops = 512", "compute_tflops = -1", 7, "grid.compute_tflops", "0 or more"),
    ("compute_tflops = 512", "compute_tflop = 512", 7, "grid.compute_tflop", "Did you mean 'compute_tflops'"),
    ('link_bandwidth = "1TB"', "", 3, "grid.link_bandwidth", "is missing"),
    ('link_bandwidth = "1TB"', "link_bandwidth = 0", 8, "grid.link_bandwidth", "more than 0"),
    ('link_bandwidth = "1TB"', 'link_bandwidth = "-1TB"', 8, "grid.link_bandwidth", "negative"),
    ("height = 2", "height = 2\nlink_latency_s = -1", 6, "grid.link_latency_s", "0 or more"),
    ("height = 2", "height = 2\nmissing = [[3, 0]]", 6, "grid.missing", "outside the 3 x 2 grid"),
    ("height = 2", "height = 2\nmissing = [3]", 6, "grid.missing", "coordinate"),
    ("height = 2", "height = 2\nmissing = [[1, 0], [0, 1]]", 6, "grid.missing", "disconnected"),
    ("[grid]", "[gird]", 3, "gird", "Did you mean 'grid'"),
    ("[grid]", "[grid", 3, "syntax", "not TOML"),
    ("width = 3", "width = = 3", 4, "width", "not TOML"),
    ('name = "small"', "name = 3", 1, "name", "must be a string"),
]
BROKEN_SITES = [
    ('dram = "1GiB"', "dram = -5", 5, "site[0].dram", "negative"),
    ("x = 1", "x = 0", 9, "site[1].x", "coordinate (0, 0) of 'b' is that of 'a' too"),
    ('name = "b"', 'name = "a"', 8, "site[1].name", "name of another site"),
    ("x = 1", 'x = "left"', 9, "site[1].x", "whole number"),
    ("x = 1\n", "", 7, "site[1].x", "is missing"),
    ('to = "b"', 'to = "bb"', 19, "link[0].to", "there is no site 'bb'. Did you mean 'b'"),
    ('to = "b"', 'to = "a"', 19, "link[0].to", "leads nowhere"),
    ('to = "b"\n', "", 17, "link[0].to", "is missing"),
    ('bandwidth = "10GB"\nlatency_s', "bandwidth = 0\nlatency_s", 20, "link[0].bandwidth", "more than 0"),
    ('bandwidth = "10GB"\nlatency_s', "latency_s", 17, "link[0].bandwidth", "is missing"),
    ("latency_s = 1e-6", "latency_s = -1e-6", 21, "link[0].latency_s", "0 or more"),
    ("latency_s = 1e-6", "latency = 1e-6", 21, "link[0].latency", "Did you mean 'latency_s'"),
    ('from = "b"\nto = "c"', 'from = "b"\nto = "a"', 25, "link[1].to", "two links"),
    (SITES[SITES.index("[[link]]") :], "", 1, "site[0].link", "links are missing"),
    (SITES[SITES.rindex("[[link]]") :], "", 13, "site[2].name", "'c' has no link: it is disconnected from 'a'"),
]


@pytest.mark.parametrize(("old", "new", "line", "field", "text"), BROKEN_GRIDS)
def test_broken_grids_name_line_and_field(old, new, line, field, text, tmp_path):
    check_broken(GRID, old, new, line, field, text, tmp_path)


@pytest.mark.parametrize(("old", "new", "line", "field", "text"), BROKEN_SITES)
def test_broken_sites_and_links_name_line_and_field(old, new, line, field, text, tmp_path):
    check_broken(SITES, old, new, line, field, text, tmp_path)


def check_broken(good, old, new, line, field, text, tmp_path):
    assert good.count(old) >= 1
    path = tmp_path / "broken.toml"
    path.write_text(good.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_mesh(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{line}: {field}: "), message
    assert text in message


def test_several_faults_say_so():
    text = SITES.replace("x = 1", "x = 0").replace("x = 2", "x = 0")
    with pytest.raises(ConfigError, match=r"site\[1\]\.x.*and 1 more, from line 12"):
        parse_mesh(text)


def test_no_site_and_no_file():
    with pytest.raises(ConfigError, match=r"<mesh>:1: site: no site"):
        parse_mesh("")
    with pytest.raises(ConfigError, match="cannot read the mesh file"):
        read_mesh("/nonexistent/mesh.toml")


def test_cluster_distances():
    mesh = mesh_of_cluster(5, dram_nbytes=2**40, host_bytes_per_s=50e9, hosts_per_rack=3, rack_bytes_per_s=200e9)
    table = mesh.distance_table()
    names = [site.name for site in mesh.sites]
    assert names == ["host-0", "host-1", "host-2", "host-3", "host-4", "rack-0", "rack-1", "spine"]
    assert table[0, 1] == 2
    assert table[0, 3] == 4
    single = mesh_of_cluster(2, dram_nbytes=1, host_bytes_per_s=1.0)
    assert [site.name for site in single.sites] == ["host-0", "host-1", "rack-0"]
    with pytest.raises(ConfigError, match="num_hosts=0"):
        mesh_of_cluster(0, dram_nbytes=1, host_bytes_per_s=1.0)


def test_cluster_file_faults():
    good = '[cluster]\nnum_hosts = 4\ndram = "1TiB"\nhost_bandwidth = "50GB"\n'
    assert len(parse_mesh(good).sites) == 5
    with pytest.raises(ConfigError, match=r"<mesh>:2: cluster\.num_hosts: 0 must be between"):
        parse_mesh(good.replace("= 4", "= 0"))
    with pytest.raises(ConfigError, match=r"<mesh>:4: cluster\.host_bandwidth: 0 must be more than 0"):
        parse_mesh(good.replace('"50GB"', "0"))


def test_built_meshes_are_checked_as_well():
    with pytest.raises(ConfigError, match=r"mesh 'm': site\[0\]\.dram_nbytes: -1 of site 'a'"):
        Mesh("m", (Site(name="a", x=0, y=0, dram_nbytes=-1),), ())
    with pytest.raises(ConfigError, match=r"link\[0\]\.target: site number 5 does not exist; there are 1"):
        Mesh("m", (Site(name="a", x=0, y=0),), (MeshLink(0, 5, 1.0),))
    with pytest.raises(ConfigError, match="at least one site"):
        Mesh("m", (), ())
    mesh = grid_mesh("g", 2, 1, dram_nbytes=5, link_bytes_per_s=2.0)
    assert mesh.index_of("die-1-0") == 1
    with pytest.raises(ConfigError, match=r"no site 'die-9-9'. Its sites: die-0-0, die-1-0\."):
        mesh.index_of("die-9-9")
