"""Floor 2. Where a mesh comes from: a TOML file, a cluster description, the live host.

A mesh file has one or more of these tables (sizes as in ``sizes.parse_nbytes``; bandwidths are sizes per second):

    name = "wafer"
    [grid]      width, height, dram, compute_tflops, dram_bandwidth, sram, link_bandwidth, link_latency_s, missing
    [[site]]    name, x, y, dram, compute_tflops, dram_bandwidth, sram, kind
    [[link]]    from, to, bandwidth, latency_s          both directions
    [cluster]   num_hosts, hosts_per_rack, dram, compute_tflops, host_bandwidth, rack_bandwidth, latency_s

``[grid]`` gives one site per coordinate, called ``die-X-Y``, linked to its four neighbours; ``missing`` lists
coordinates without a die. ``[cluster]`` gives hosts below rack switches below a spine. Every fault is a
``ConfigError`` that names the file, the line and the field.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.sizes import parse_nbytes
from lightning_tieroffload.topology.mesh import Fault, Mesh, MeshLink, Site, find_faults

__all__ = ["HostLike", "grid_mesh", "mesh_of_cluster", "mesh_of_host", "parse_mesh", "read_mesh"]

_KEYS = {
    "": ("name", "grid", "site", "link", "cluster"),
    "grid": (
        "width", "height", "dram", "compute_tflops", "dram_bandwidth", "sram", "link_bandwidth", "link_latency_s",
        "missing",
    ),
    "site": ("name", "x", "y", "dram", "compute_tflops", "dram_bandwidth", "sram", "kind"),
    "link": ("from", "to", "bandwidth", "latency_s"),
    "cluster": (
        "num_hosts", "hosts_per_rack", "dram", "compute_tflops", "host_bandwidth", "rack_bandwidth", "latency_s",
    ),
}  # fmt: skip
_REQUIRED = {
    "grid": ("width", "height", "dram", "link_bandwidth"),
    "site": ("name", "x", "y"),
    "link": ("from", "to", "bandwidth"),
    "cluster": ("num_hosts", "dram", "host_bandwidth"),
}
# A field of the nouns, as it is called in a file.
_FILE_KEY = {
    "dram_nbytes": "dram", "compute_flops_per_s": "compute_tflops", "dram_bytes_per_s": "dram_bandwidth",
    "sram_nbytes": "sram", "source": "from", "target": "to", "bytes_per_s": "bandwidth",
}  # fmt: skip


class HostLike(Protocol):
    """What ``mesh_of_host`` needs of a host: see host.Host."""

    @property
    def nodes(self) -> Sequence[Any]: ...
    @property
    def gpus(self) -> Sequence[Any]: ...
    @property
    def disks(self) -> Sequence[Any]: ...
    @property
    def distances(self) -> Sequence[Sequence[float]]: ...


def read_mesh(path: str | Path) -> Mesh:
    """The mesh that the TOML file at ``path`` describes. Raises ``ConfigError`` with file, line and field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the mesh file {path}: {error}") from error
    return parse_mesh(text, file_name=str(path))


def parse_mesh(text: str, *, file_name: str = "<mesh>") -> Mesh:
    """As ``read_mesh``, from text."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else text.count("\n") + 1
        field = _key_on_line(text, line)
        raise ConfigError(f"{file_name}:{line}: {field}: not TOML: {error}") from error
    return _Reader(text, data, file_name).mesh()


def _key_on_line(text: str, line: int) -> str:
    lines = text.splitlines()
    found = re.match(r"\s*([\w.\-\"]+)\s*=", lines[line - 1]) if 0 < line <= len(lines) else None
    return found.group(1) if found else "syntax"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a row of sites or links came from: its table in the file."""

    table: str
    row: int


class _Reader:
    def __init__(self, text: str, data: dict[str, Any], file_name: str) -> None:
        self._data = data
        self._file_name = file_name
        self._lines = _locate(text)
        self._sites: list[Site] = []
        self._links: list[MeshLink] = []
        self._site_from: list[_Origin] = []
        self._link_from: list[_Origin] = []

    def fail(self, table: str, row: int, field: str, message: str) -> ConfigError:
        places = [(table, row, field), (table, row, ""), (table, 0, "")]
        if not table:
            places[1:1] = [(field, 0, "")]  # a table of that name
        line = next((self._lines[place] for place in places if place in self._lines), 1)
        where = f"{table}[{row}].{field}" if table in ("site", "link") else f"{table}.{field}" if table else field
        return ConfigError(f"{self._file_name}:{line}: {where}: {message}")

    def mesh(self) -> Mesh:
        self._check_keys("", 0, self._data)
        name = self._data.get("name", Path(self._file_name).stem)
        if not isinstance(name, str):
            raise self.fail("", 0, "name", f"must be a string, not {name!r}.")
        if "grid" in self._data:
            self._read_grid(self._table("grid"))
        if "cluster" in self._data:
            self._read_cluster(self._table("cluster"))
        for row, table in enumerate(self._rows("site")):
            self._check_keys("site", row, table)
            site = Site(
                name=self._string("site", row, table, "name"),
                x=self._whole("site", row, table, "x"),
                y=self._whole("site", row, table, "y"),
                kind=self._string("site", row, table, "kind") if "kind" in table else "die",
                **self._memory_and_compute("site", row, table),
            )
            self._sites.append(site)
            self._site_from.append(_Origin("site", row))
        names: dict[str, int] = {}
        for number, site in enumerate(self._sites):
            if site.name in names:  # said here, as links refer to names
                origin = self._site_from[number]
                raise self.fail(origin.table, origin.row, "name", f"{site.name!r} is the name of another site as well.")
            names[site.name] = number
        for row, table in enumerate(self._rows("link")):
            self._check_keys("link", row, table)
            ends = []
            for key in ("from", "to"):
                end = self._string("link", row, table, key)
                if end not in names:
                    raise self.fail("link", row, key, f"there is no site {end!r}.{_suggest(end, names)}")
                ends.append(names[end])
            bandwidth = self._size("link", row, table, "bandwidth")
            latency_s = self._number("link", row, table, "latency_s", 0.0)
            for source, target in (ends, ends[::-1]):
                self._links.append(MeshLink(source, target, bandwidth, latency_s))
                self._link_from.append(_Origin("link", row))
        if not self._sites:
            raise self.fail("", 0, "site", "no site. Describe the mesh by [grid], [[site]] and [[link]], or [cluster].")
        if len(self._sites) > 1 and not self._links:
            origin = self._site_from[0]
            raise self.fail(
                origin.table,
                origin.row,
                "link",
                f"{len(self._sites)} sites and no link: links are missing. Add [[link]] tables.",
            )
        faults = find_faults(self._sites, self._links)
        if faults:
            raise self._located(faults)
        return Mesh(name, tuple(self._sites), tuple(self._links))

    def _located(self, faults: list[Fault]) -> ConfigError:
        fault = faults[0]
        origins = self._site_from if fault.table == "site" else self._link_from
        origin = origins[fault.row] if fault.row < len(origins) else _Origin(fault.table, fault.row)
        field = _FILE_KEY.get(fault.field, fault.field)
        if origin.table == "grid":
            field = "missing" if "disconnected" in fault.message else field
            field = {"bandwidth": "link_bandwidth", "latency_s": "link_latency_s"}.get(field, field)
        lines = {
            self._lines.get((o.table, o.row, ""), 1)
            for o in (origins[f.row] for f in faults[1:] if f.row < len(origins))
        }
        more = f" (and {len(faults) - 1} more, from line {min(lines)})" if lines else ""
        return self.fail(origin.table, origin.row, field, fault.message + more)

    # Tables

    def _table(self, key: str) -> Mapping[str, Any]:
        table = self._data[key]
        if not isinstance(table, dict):
            raise self.fail("", 0, key, f"must be a table [{key}], not {table!r}.")
        self._check_keys(key, 0, table)
        return table

    def _rows(self, key: str) -> list[Mapping[str, Any]]:
        rows = self._data.get(key, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self.fail("", 0, key, f"must be a list of tables [[{key}]].")
        return rows

    def _check_keys(self, table: str, row: int, given: Mapping[str, Any]) -> None:
        known = _KEYS[table]
        for key in given:
            if key not in known:
                raise self.fail(table, row, key, f"unknown key.{_suggest(key, known)} Known: {', '.join(known)}.")
        for key in _REQUIRED.get(table, ()):
            if key not in given:
                raise self.fail(table, row, key, "is missing.")

    def _read_grid(self, table: Mapping[str, Any]) -> None:
        width, height = (self._whole("grid", 0, table, key) for key in ("width", "height"))
        for key, value in (("width", width), ("height", height)):
            if not 1 <= value <= 1000:
                raise self.fail("grid", 0, key, f"{value} must be between 1 and 1000.")
        missing: set[tuple[int, int]] = set()
        for item in table.get("missing", []):
            if not (isinstance(item, list) and len(item) == 2 and all(type(part) is int for part in item)):
                raise self.fail("grid", 0, "missing", f"{item!r} must be a coordinate [x, y].")
            if not (0 <= item[0] < width and 0 <= item[1] < height):
                raise self.fail("grid", 0, "missing", f"{item} lies outside the {width} x {height} grid.")
            missing.add((item[0], item[1]))
        common = self._memory_and_compute("grid", 0, table)
        bandwidth = self._size("grid", 0, table, "link_bandwidth")
        latency_s = self._number("grid", 0, table, "link_latency_s", 0.0)
        sites, links = _grid(width, height, missing, bandwidth, latency_s, common)
        self._append("grid", sites, links)

    def _read_cluster(self, table: Mapping[str, Any]) -> None:
        num_hosts = self._whole("cluster", 0, table, "num_hosts")
        per_rack = self._whole("cluster", 0, table, "hosts_per_rack") if "hosts_per_rack" in table else num_hosts
        for key, value in (("num_hosts", num_hosts), ("hosts_per_rack", per_rack)):
            if not 1 <= value <= 100_000:
                raise self.fail("cluster", 0, key, f"{value} must be between 1 and 100000.")
        common = self._memory_and_compute("cluster", 0, table)
        host_bandwidth = self._size("cluster", 0, table, "host_bandwidth")
        rack_bandwidth = (
            self._size("cluster", 0, table, "rack_bandwidth") if "rack_bandwidth" in table else host_bandwidth
        )
        latency_s = self._number("cluster", 0, table, "latency_s", 0.0)
        for key, speed in (("host_bandwidth", host_bandwidth), ("rack_bandwidth", rack_bandwidth)):
            if speed <= 0:
                raise self.fail("cluster", 0, key, f"{speed} must be more than 0 bytes per second.")
        self._append("cluster", *_cluster(num_hosts, per_rack, common, host_bandwidth, rack_bandwidth, latency_s))

    def _append(self, table: str, sites: list[Site], links: list[MeshLink]) -> None:
        base = len(self._sites)
        self._sites += sites
        self._site_from += [_Origin(table, 0)] * len(sites)
        self._links += [MeshLink(a.source + base, a.target + base, a.bytes_per_s, a.latency_s) for a in links]
        self._link_from += [_Origin(table, 0)] * len(links)

    # Values

    def _memory_and_compute(self, table: str, row: int, given: Mapping[str, Any]) -> dict[str, Any]:
        compute_tflops = self._number(table, row, given, "compute_tflops", 0.0)
        return {
            "dram_nbytes": int(self._size(table, row, given, "dram", 0)),
            "dram_bytes_per_s": float(self._size(table, row, given, "dram_bandwidth", 0)),
            "sram_nbytes": int(self._size(table, row, given, "sram", 0)),
            "compute_flops_per_s": compute_tflops * 1e12,
        }

    def _size(self, table: str, row: int, given: Mapping[str, Any], key: str, default: float = 0) -> float:
        if key not in given:
            return default
        value = given[key]
        if isinstance(value, str) and value.strip().startswith("-"):
            raise self.fail(table, row, key, f"{value!r} is negative: it must be 0 or more.")
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            raise self.fail(table, row, key, f"{value} is negative: it must be 0 or more.")
        try:
            return parse_nbytes(value, key=key)
        except ConfigError as error:
            raise self.fail(table, row, key, str(error)) from None

    def _number(self, table: str, row: int, given: Mapping[str, Any], key: str, default: float) -> float:
        value = given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise self.fail(table, row, key, f"{value!r} must be a finite number, 0 or more.")
        return float(value)

    def _whole(self, table: str, row: int, given: Mapping[str, Any], key: str) -> int:
        value = given[key]
        if type(value) is not int or abs(value) > 2**23:
            raise self.fail(table, row, key, f"{value!r} must be a whole number between -2**23 and 2**23.")
        return value

    def _string(self, table: str, row: int, given: Mapping[str, Any], key: str) -> str:
        value = given[key]
        if not isinstance(value, str) or not value:
            raise self.fail(table, row, key, f"{value!r} must be a name.")
        return value


def _suggest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _locate(text: str) -> dict[tuple[str, int, str], int]:
    """Line of every (table, row of that table, key); key "" is the table's own line. tomllib keeps no positions."""
    lines: dict[tuple[str, int, str], int] = {}
    rows: dict[str, int] = {}
    table, row = "", 0
    inline = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if inline:  # inside site = [ {...}, ... ]: one row per brace
            number_rows = _inline_rows(raw, inline, rows, number, lines)
            if line.startswith("]") or (number_rows and line.endswith("]")):
                inline = ""
            continue
        header = re.match(r"(\[\[?)\s*([\w\-\"']+)\s*\]", line)
        if header:
            table = header.group(2).strip("\"'")
            row = rows.get(table, -1) + 1 if header.group(1) == "[[" else 0
            rows[table] = row
            lines[table, row, ""] = number
            continue
        key = re.match(r"([\w\-\"']+)(\.[\w\-\"']+)?\s*=\s*(\[?)", line)
        if key:
            word = key.group(1).strip("\"'")
            lines.setdefault((table, row, word), number)
            if key.group(2):  # grid.width = 4
                lines.setdefault((word, 0, ""), number)
                lines.setdefault((word, 0, key.group(2)[1:].strip("\"'")), number)
            if key.group(3) and table == "" and word in ("site", "link"):
                rows.setdefault(word, -1)
                lines.setdefault((word, 0, ""), number)
                found = _inline_rows(raw[raw.index("[") + 1 :], word, rows, number, lines)
                inline = "" if found and line.endswith("]") else word
    return lines


def _inline_rows(
    raw: str, table: str, rows: dict[str, int], number: int, lines: dict[tuple[str, int, str], int]
) -> bool:
    found = re.findall(r"\{([^}]*)\}?", raw)
    for body in found:
        rows[table] = rows.get(table, -1) + 1
        lines[table, rows[table], ""] = number
        for word in re.findall(r"([\w\-]+)\s*=", body):
            lines[table, rows[table], word] = number
    return bool(found)


def _grid(
    width: int,
    height: int,
    missing: set[tuple[int, int]],
    link_bytes_per_s: float,
    latency_s: float,
    common: dict[str, Any],
) -> tuple[list[Site], list[MeshLink]]:
    places = [(x, y) for y in range(height) for x in range(width) if (x, y) not in missing]
    number_at = {place: number for number, place in enumerate(places)}
    sites = [Site(name=f"die-{x}-{y}", x=x, y=y, **common) for x, y in places]
    links = [
        MeshLink(number, number_at[other], link_bytes_per_s, latency_s)
        for number, (x, y) in enumerate(places)
        for other in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1))
        if other in number_at
    ]
    return sites, links


def grid_mesh(
    name: str,
    width: int,
    height: int,
    *,
    dram_nbytes: int,
    link_bytes_per_s: float,
    compute_flops_per_s: float = 0.0,
    dram_bytes_per_s: float = 0.0,
    sram_nbytes: int = 0,
    link_latency_s: float = 0.0,
    missing: Sequence[tuple[int, int]] = (),
) -> Mesh:
    """A width x height grid of equal sites, each linked to its four neighbours; ``missing`` coordinates left out."""
    common = {
        "dram_nbytes": dram_nbytes,
        "compute_flops_per_s": compute_flops_per_s,
        "dram_bytes_per_s": dram_bytes_per_s,
        "sram_nbytes": sram_nbytes,
    }
    sites, links = _grid(width, height, set(missing), link_bytes_per_s, link_latency_s, common)
    return Mesh(name, tuple(sites), tuple(links))


def _cluster(
    num_hosts: int,
    hosts_per_rack: int,
    common: dict[str, Any],
    host_bytes_per_s: float,
    rack_bytes_per_s: float,
    latency_s: float,
) -> tuple[list[Site], list[MeshLink]]:
    # Column = rack, row 0 = its switch, rows below = its hosts; the spine sits above the racks.
    num_racks = -(-num_hosts // hosts_per_rack)
    sites = [
        Site(name=f"host-{host}", x=host // hosts_per_rack, y=1 + host % hosts_per_rack, kind="host", **common)
        for host in range(num_hosts)
    ]
    sites += [Site(name=f"rack-{rack}", x=rack, y=0, kind="switch") for rack in range(num_racks)]
    pairs = [(host, num_hosts + host // hosts_per_rack, host_bytes_per_s) for host in range(num_hosts)]
    if num_racks > 1:
        sites.append(Site(name="spine", x=0, y=-1, kind="switch"))
        pairs += [(num_hosts + rack, num_hosts + num_racks, rack_bytes_per_s) for rack in range(num_racks)]
    links = [MeshLink(*ends, speed, latency_s) for a, b, speed in pairs for ends in ((a, b), (b, a))]
    return sites, links


def mesh_of_cluster(
    num_hosts: int,
    *,
    dram_nbytes: int,
    host_bytes_per_s: float,
    hosts_per_rack: int | None = None,
    rack_bytes_per_s: float | None = None,
    compute_flops_per_s: float = 0.0,
    latency_s: float = 0.0,
    name: str = "cluster",
) -> Mesh:
    """Hosts below rack switches below a spine. Two hosts of a rack are 2 hops apart, of two racks 4."""
    if num_hosts < 1 or (hosts_per_rack is not None and hosts_per_rack < 1):
        raise ConfigError(f"num_hosts={num_hosts} and hosts_per_rack={hosts_per_rack} must be 1 or more.")
    common = {"dram_nbytes": dram_nbytes, "compute_flops_per_s": compute_flops_per_s}
    sites, links = _cluster(
        num_hosts,
        hosts_per_rack or num_hosts,
        common,
        host_bytes_per_s,
        rack_bytes_per_s or host_bytes_per_s,
        latency_s,
    )
    return Mesh(name, tuple(sites), tuple(links))


def mesh_of_host(
    host: HostLike,
    *,
    node_bytes_per_s: float = 50e9,
    gpu_bytes_per_s: float = 55e9,
    disk_bytes_per_s: float = 3e9,
    name: str = "host",
) -> Mesh:
    """The live host as a mesh: NUMA nodes in a row, each one's GPUs below it and its disks above it.

    Bandwidths are placeholders until somebody measures them: sysfs states distances, no rates. Distances between nodes
    are sysfs's own divided by the local distance (10), less the 1 for staying at home; a GPU or disk adds 1.
    """
    rows = {node.number: row for row, node in enumerate(host.nodes)}
    sites = [
        Site(name=f"node{node.number}", x=row, y=0, dram_nbytes=node.total_nbytes, kind="node")
        for row, node in enumerate(host.nodes)
    ]
    home = list(range(len(sites)))
    speeds = [0.0] * len(sites)
    depth = {(row, side): 0 for row in rows.values() for side in (-1, 1)}
    for devices, side, kind, speed in (
        (host.gpus, 1, "gpu", gpu_bytes_per_s),
        (host.disks, -1, "disk", disk_bytes_per_s),
    ):
        for number, device in enumerate(devices):
            row = rows.get(device.node, 0)  # a device whose node sysfs does not know is drawn at the first
            depth[row, side] += 1
            label = f"gpu{number}" if kind == "gpu" else device.name
            sites.append(Site(name=label, x=row, y=side * depth[row, side], kind=kind))
            home.append(row)
            speeds.append(speed)
    links = []
    num_nodes = len(host.nodes)
    for a in range(num_nodes):
        links += [MeshLink(a, b, node_bytes_per_s) for b in range(num_nodes) if a != b]
    for device in range(num_nodes, len(sites)):
        links += [
            MeshLink(device, home[device], speeds[device]),
            MeshLink(home[device], device, speeds[device]),
        ]
    table = [
        [
            0.0 if a == b else host.distances[home[a]][home[b]] / 10 - 1 + (a >= num_nodes) + (b >= num_nodes)
            for b in range(len(sites))
        ]
        for a in range(len(sites))
    ]
    return Mesh(name, tuple(sites), tuple(links), tuple(tuple(row) for row in table))
