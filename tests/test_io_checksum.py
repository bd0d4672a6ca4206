"""The checksum of what goes to flash: the published function, no interpreter lock held, and a way without xxhash."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_tieroffload.io.checksum import CHECKSUM_NAME, checksum_of, crc32_of, xxh3_of
from lightning_tieroffload.sizes import MiB

REPO = Path(__file__).parents[1]


def test_published_values() -> None:
    """xxHash's XXH3_64bits of nothing and of "abc", and the check value of CRC-32."""
    assert CHECKSUM_NAME == "xxh3"
    assert checksum_of is xxh3_of
    assert xxh3_of(memoryview(b"")) == 0x2D06800538D394C2
    assert xxh3_of(memoryview(b"abc")) == 0x78AF5F94892F3950
    assert crc32_of(memoryview(b"123456789")) == 0xCBF43926


@pytest.mark.alone
@pytest.mark.parametrize("function", [xxh3_of, crc32_of])
def test_hashing_lets_other_threads_run(function: Callable[[memoryview], int]) -> None:
    """While one thread hashes for long, another gets on in pure Python: the interpreter lock is not held."""
    memory = memoryview(bytes(256 * MiB))
    span_s: list[float] = []

    def run() -> None:
        span_s.append(time.perf_counter())
        function(memory)
        span_s.append(time.perf_counter())

    def num_turns_meanwhile() -> int:
        span_s.clear()
        thread = threading.Thread(target=run)
        thread.start()
        turns_s = []
        while len(span_s) < 2:
            turns_s.append(time.perf_counter())
        thread.join()
        margin_s = 0.2 * (span_s[1] - span_s[0])
        return sum(span_s[0] + margin_s < turn_s < span_s[1] - margin_s for turn_s in turns_s)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # or this thread has the lock for 5 ms before the other can say that it has ended
    try:
        # The median: a busy machine may stop either thread for a while.
        assert statistics.median(num_turns_meanwhile() for _ in range(9)) > 100
    finally:
        sys.setswitchinterval(interval_s)


def test_without_xxhash_the_store_works_and_says_so(tmp_path: Path) -> None:
    """A machine where nothing can be installed: crc32 finds the flipped byte, one warning says what that costs."""
    code = f"""
import sys, logging
sys.modules["xxhash"] = None
sys.modules["aiofiles"] = None
logging.basicConfig()
from lightning_tieroffload.errors import ChecksumError
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import Scheduler
with ExtentStore([{str(tmp_path)!r}]) as store, Scheduler(NvmeMover.lane_specs(1), timeout_s=20) as scheduler:
    mover = NvmeMover(scheduler, store)
    store.allocate("s", 10000)
    mover.write("s", memoryview(bytes(10000))).wait()
    memory = memoryview(bytearray(10000))
    mover.read("s", memory).wait()
    extent = store.pieces_of("s")[0].extent
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset_nbytes + 77)
        file.write(b"x")
    try:
        mover.read("s", memory, may_fail=True).wait()
    except ChecksumError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "crc32" in done.stdout
    assert done.stderr.count("xxhash is not installed") == 1
