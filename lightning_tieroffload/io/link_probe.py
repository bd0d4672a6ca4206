"""Floor 5. Bytes per second between host memory and a CUDA device, through the copy streams that the engine uses."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tieroffload.engine.streams import CopyTicket, Pairs, make_streams
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.sizes import MiB

__all__ = ["LinkRates", "probe_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Of one device, from and to the pinned arena. ``both``: both directions at once, summed."""

    device: str
    device_name: str
    is_page_locked: bool
    nbytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both_bytes_per_s: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def probe_links(device: torch.device, *, nbytes: int = 256 * MiB, num_rounds: int = 5) -> LinkRates:
    """Copy ``nbytes`` (a first time uncounted) each way, then both at once; medians of ``num_rounds``."""
    with PinnedArena(2 * nbytes, pin=True) as arena:
        up_host, down_host = (arena.take(nbytes).tensor(torch.uint8, (nbytes,)) for _ in range(2))
        up_device, down_device = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        streams = make_streams(device, on_stall=lambda *_: None)
        up, down = [(up_device, up_host)], [(down_host, down_device)]

        def rate(*copies: tuple[Callable[[Pairs, str], CopyTicket], Pairs]) -> float:
            seconds = []
            for _ in range(num_rounds + 1):
                started_s = time.perf_counter()
                for ticket in [copy(pairs, "probe") for copy, pairs in copies]:
                    ticket.wait()
                seconds.append(time.perf_counter() - started_s)
            return len(copies) * nbytes / statistics.median(seconds[1:])

        try:
            return LinkRates(
                device=str(device),
                device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory",
                is_page_locked=arena.pinned,
                nbytes=nbytes,
                h2d_bytes_per_s=rate((streams.upload, up)),
                d2h_bytes_per_s=rate((streams.download, down)),
                both_bytes_per_s=rate((streams.upload, up), (streams.download, down)),
            )
        finally:
            streams.close()
