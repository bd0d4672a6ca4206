"""Direct I/O: any length and alignment, short transfers, refusals, errors with context (STO-01, 02, 06 to 09, 11)."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.errors import TierIOError
from lightning_tieroffload.io import direct_file
from lightning_tieroffload.io.direct_file import DirectFile, FallbackNotice, dio_align_nbytes, filesystem_of
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.sizes import GiB, KiB, MiB


def aligned(nbytes: int, shift: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes + 4096))[shift : shift + nbytes]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def takes_direct(tmp_path: Path) -> None:
    """Skips where the file system under the tests' directory refuses direct I/O."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    with DirectFile(tmp_path / "data-0") as opened:
        yield opened


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("numel", [1, 3, 511, 513, 1001, 4095, 4097])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call_nbytes", [512, 4096, 1 * MiB])
def test_sto_01_tail_of_an_unaligned_tensor_is_kept(
    tmp_path: Path, numel: int, dtype: torch.dtype, call_nbytes: int
) -> None:
    with PinnedArena(1 * MiB, pin=False) as arena, DirectFile(tmp_path / "f", max_call_nbytes=call_nbytes) as file:
        assert file.mode == "direct"
        source = arena.take(numel * dtype.itemsize, align_nbytes=4096)
        tensor = source.tensor(dtype, (numel,))
        tensor.copy_(torch.randn(numel) * 50)
        assert file.write(source.memory(), 8192, pad_tail=True) == -(-source.nbytes // 4096) * 4096
        target = arena.take(source.nbytes, align_nbytes=4096)
        file.read(target.memory(), 8192)
        assert torch.equal(target.tensor(torch.uint8, (source.nbytes,)), source.tensor(torch.uint8, (source.nbytes,)))


def test_sto_01_views_with_offset_and_non_contiguous(file: DirectFile) -> None:
    whole = torch.arange(5000, dtype=torch.float32)
    for view in (whole[7:1008], whole.view(50, 100)[:, ::3].contiguous(), whole[::2].clone()):
        memory = memoryview(view.numpy()).cast("B")
        file.write(memory, 4096, pad_tail=True)
        back = torch.empty_like(view)
        file.read(memoryview(back.numpy()).cast("B"), 4096)
        assert torch.equal(back, view)


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_sto_07_every_combination_of_odd_length_address_and_offset(tmp_path: Path, mode: str) -> None:
    """The kernel refuses most of these; through our functions every one is exact and spoils no neighbour."""
    content = bytearray(pattern(64 * KiB))
    path = tmp_path / "f"
    path.write_bytes(content)
    with DirectFile(path, direct=mode == "direct") as file:
        assert file.mode == mode
        for index, (nbytes, shift, offset) in enumerate(
            (nbytes, shift, offset)
            for nbytes in (1, 512, 1000, 4096, 4097, 9000)
            for shift in (0, 1, 512)
            for offset in (0, 100, 512, 4096, 8191)
        ):
            new = pattern(nbytes, index)
            memory = aligned(nbytes, shift)
            memory[:] = new
            file.write(memory, offset)
            content[offset : offset + nbytes] = new
            back = aligned(nbytes, shift)
            file.read(back, offset)
            assert back == new
        assert file.mode == mode
    assert path.read_bytes() == content


def test_writes_past_the_end_leave_the_logical_length(file: DirectFile) -> None:
    file.write(memoryview(b"abc"), 5000)
    assert Path(file.path).read_bytes() == bytes(5000) + b"abc"
    file.write(memoryview(b"defg"), 5003)
    assert Path(file.path).read_bytes() == bytes(5000) + b"abcdefg"


@pytest.mark.usefixtures("takes_direct")
def test_larger_than_the_bounce(file: DirectFile) -> None:
    source, back = aligned(3 * MiB + 17, 5), aligned(3 * MiB + 17, 9)
    source[:] = pattern(len(source))
    file.write(source, 12345)
    file.read(back, 12345)
    assert back == source
    assert file.mode == "direct"


def test_empty_transfer_is_a_no_op(file: DirectFile) -> None:
    assert file.write(memoryview(b""), 0) == 0
    file.read(memoryview(bytearray()), 0)


# --- faults through patched calls -----------------------------------------------------------------------------------


def half(real: Callable[..., int]) -> Callable[..., int]:
    return lambda fd, buffers, offset: real(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)


def at_most(real: Callable[..., int], nbytes: int) -> Callable[..., int]:
    return lambda fd, buffers, offset: real(fd, [buffers[0][:nbytes]], offset)


def failing(real: Callable[..., int], errors: list[int | None]) -> Callable[..., int]:
    def call(fd: int, buffers: list[Any], offset: int) -> int:
        code = errors.pop(0) if errors else None
        if code is not None:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    return call


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("nbytes", [1000, 64 * KiB, 300_001])
def test_sto_02_short_transfers_are_completed(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    monkeypatch.setattr(os, "pwritev", half(os.pwritev))
    monkeypatch.setattr(os, "preadv", half(os.preadv))
    source, back = aligned(nbytes), aligned(nbytes)
    source[:] = pattern(nbytes)
    file.write(source, 0, pad_tail=True)
    file.read(back, 0)
    assert back == source
    assert file.mode == "direct"  # a short transfer is not a refusal
    assert not caplog.records


def test_sto_11_calls_are_bounded_and_looped(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", at_most(os.pwritev, 64 * KiB))
    monkeypatch.setattr(os, "preadv", at_most(os.preadv, 64 * KiB))
    source, back = aligned(1 * MiB + 3), aligned(1 * MiB + 3)
    source[:] = pattern(len(source))
    file.write(source, 0)
    file.read(back, 0)
    assert back == source


def test_sto_11_no_call_asks_for_more_than_one_gib(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB + 8 KiB of address space that is never touched: the calls are counted, not made."""
    asked: list[tuple[int, int]] = []

    def count(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return len(buffers[0])

    monkeypatch.setattr(os, "pwritev", count)
    monkeypatch.setattr(os, "preadv", count)
    memory = memoryview(mmap.mmap(-1, 2 * GiB + 8 * KiB))
    expected = [(0, GiB), (GiB, GiB), (2 * GiB, 8 * KiB)]
    file.write(memory, 0)
    assert asked == expected
    asked.clear()
    file.read(memory, 0)
    assert asked == expected


@pytest.mark.slow
def test_sto_11_two_gib_for_real(file: DirectFile) -> None:
    nbytes = 2 * GiB + 8 * KiB
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    memory[:: 1 << 20] = torch.arange(len(memory[:: 1 << 20])) % 251
    memory[-1] = 77
    file.write(memoryview(memory.numpy()), 0)
    back = torch.empty_like(memory)
    file.read(memoryview(back.numpy()), 0)
    assert torch.equal(back, memory)


@pytest.mark.parametrize("codes", [[errno.EINTR], [errno.EAGAIN, errno.EINTR, errno.EAGAIN]])
def test_interrupted_and_again_are_retried(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch, codes: list[int | None]
) -> None:
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, list(codes)))
    monkeypatch.setattr(os, "preadv", failing(os.preadv, list(codes)))
    source, back = aligned(8192), aligned(8192)
    source[:] = pattern(8192)
    file.write(source, 0)
    file.read(back, 0)
    assert back == source


def test_again_for_ever_and_nothing_moved_for_ever_are_errors(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, [errno.EAGAIN] * 10_000))
    with pytest.raises(TierIOError) as info:
        file.write(aligned(4096), 0)
    assert info.value.errno == errno.EAGAIN
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(TierIOError, match="accepts no more bytes"):
        file.write(aligned(4096), 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_sto_02_errno_becomes_an_error_with_context(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch, code: int, verb: str
) -> None:
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, [None, code]))
    monkeypatch.setattr(os, "preadv", failing(os.preadv, [code]))
    file.write(aligned(4096), 0)
    with pytest.raises(TierIOError) as info:
        getattr(file, verb)(aligned(2 * MiB), 4096, shard="layers.3:exp_avg")
    error = info.value
    assert isinstance(error, OSError)
    assert isinstance(error.__cause__, OSError)
    assert (error.errno, error.path, error.offset_nbytes, error.nbytes, error.shard) == (
        code, file.path, 4096, 2 * MiB, "layers.3:exp_avg",
    )  # fmt: skip
    for part in (verb, "2 MiB", "offset 4096", file.path, "layers.3:exp_avg", os.strerror(code)):
        assert part in str(error)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert "needed 2 MiB" in str(error)
        assert "free there" in str(error)
        assert "nvme_budget" in str(error)


def test_sto_02_file_size_limit_gives_a_short_write_and_then_an_error(file: DirectFile) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KiB, hard))
    try:
        with pytest.raises(TierIOError, match="ulimit -f") as info:
            file.write(aligned(128 * KiB), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert info.value.errno == errno.EFBIG


def test_dev_full_is_no_space() -> None:
    with DirectFile("/dev/full", direct=False) as file, pytest.raises(TierIOError) as info:
        file.write(aligned(4096), 0)
    assert info.value.errno == errno.ENOSPC


def test_file_that_is_too_short_is_an_error(file: DirectFile) -> None:
    file.write(memoryview(pattern(6000)), 0)
    with pytest.raises(TierIOError, match="shorter") as info:
        file.read(aligned(8192), 0, shard="u:param")
    assert info.value.shard == "u:param"
    back = aligned(6000)
    file.read(back, 0)
    assert back == pattern(6000)


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_sto_07_open_refuses_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    notice = FallbackNotice()
    with caplog.at_level(logging.WARNING):
        files = [DirectFile(tmp_path / f"data-{i}", notice=notice) for i in range(3)]
        for file in files:
            assert file.mode == "buffered"
            assert os.strerror(code) in str(file.fallback_reason)
            source, back = aligned(100_001, 3), aligned(100_001)
            source[:] = pattern(100_001)
            file.write(source, 100)
            file.read(back, 100)
            assert back == source
            file.close()
    (record,) = caplog.records
    for part in ("refuses direct I/O", os.strerror(code), "buffered mode", "page cache", "nvme_paths"):
        assert part in record.getMessage()


@pytest.mark.usefixtures("takes_direct")
@pytest.mark.parametrize("verb", ["read", "write"])
def test_sto_07_transfer_refuses_direct_once(
    file: DirectFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """A file system that opens with O_DIRECT and refuses the transfer: on in buffered mode, said once, exact."""
    if verb == "write":
        monkeypatch.setattr(os, "pwritev", failing(os.pwritev, [errno.EINVAL]))
    else:
        monkeypatch.setattr(os, "preadv", failing(os.preadv, [errno.EINVAL]))
    source, back = aligned(50_000), aligned(50_000)
    source[:] = pattern(50_000)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            file.write(source, 4096, pad_tail=True)
            file.read(back, 4096)
    assert back == source
    assert file.mode == "buffered"
    assert file.fallback_reason == f"{verb}: Invalid argument"
    assert len(caplog.records) == 1


def test_sto_08_statx_says_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "dio_align_nbytes", lambda _: None)
    with DirectFile(tmp_path / "f") as file:
        assert file.mode == "buffered"
        file.write(memoryview(b"x" * 5001), 3)
        back = aligned(5001)
        file.read(back, 3)
        assert back == b"x" * 5001


@pytest.mark.usefixtures("takes_direct")
def test_larger_device_alignment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "dio_align_nbytes", lambda _: 16 * KiB)
    real = os.pwritev
    seen: list[tuple[int, int]] = []

    def watch(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, len(buffers[0])))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", watch)
    with DirectFile(tmp_path / "f") as file:
        source, back = aligned(50_000), aligned(50_000)
        source[:] = pattern(50_000)
        file.write(source, 20_000)
        file.read(back, 20_000)
        assert back == source
    assert all(offset % (16 * KiB) == 0 and nbytes % (16 * KiB) == 0 for offset, nbytes in seen)


def test_dio_alignment_of_a_real_file_is_4_kib_or_more(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    answer = dio_align_nbytes(str(tmp_path / "f"))
    assert answer is None or answer >= 4096
    assert dio_align_nbytes(str(tmp_path / "missing")) == 4096


def test_sto_09_memory_is_told_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_of("/dev/shm").name == "tmpfs"
    assert filesystem_of("/dev/shm").kind == "memory"
    assert "host memory and not flash" in str(filesystem_of("/dev/shm").warning)
    assert filesystem_of(tmp_path).name in ("ext4", "xfs", "btrfs", "overlay", "tmpfs")
    assert filesystem_of("/proc").kind == "other"
    with pytest.raises(TierIOError, match="No such file"):
        filesystem_of(tmp_path / "missing")

    class Fake:
        def statfs(self, path: bytes, buffer: Any) -> int:
            buffer[0:8] = magic.to_bytes(8, "little")
            return 0

    monkeypatch.setattr(direct_file, "_libc", Fake())
    for magic, kind, part in [  # noqa: B007 (the fake reads it)
        (0x6969, "network", "nfs"),
        (0xFF534D42, "network", "cifs"),
        (0x65735546, "fuse", "user process"),
        (0x858458F6, "memory", "ramfs"),
    ]:
        assert filesystem_of(tmp_path).kind == kind
        assert part in str(filesystem_of(tmp_path).warning)


def test_buffered_mode_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    """16 MiB through buffered mode leave (almost) nothing of the file in memory, counted by mincore."""
    if filesystem_of(tmp_path).kind == "memory":
        pytest.skip(f"in {tmp_path} the page cache is the storage")
    nbytes = 16 * MiB
    with DirectFile(tmp_path / "f", direct=False) as file:
        for offset in range(0, nbytes, MiB):
            file.write(aligned(MiB), offset)
        for offset in range(0, nbytes, MiB):
            file.read(aligned(MiB), offset)
        mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        present = (ctypes.c_ubyte * (nbytes // 4096))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), present) == 0
        assert sum(byte & 1 for byte in present) * 4096 < nbytes // 8


def test_sto_06_descriptor_closed_under_us_and_double_close(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "f")
    file.write(aligned(4096), 0)
    os.close(file.fileno())
    with pytest.raises(TierIOError, match="closed by somebody else") as info:
        file.write(aligned(4096), 0)
    assert info.value.errno == errno.EBADF
    file.close()
    file.close()
    assert file.closed
    with pytest.raises(TierIOError, match="store was closed"):
        file.read(aligned(4096), 0)


def test_open_errors_are_named_and_leave_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, code in [(tmp_path / "no" / "f", errno.ENOENT), (tmp_path, errno.EISDIR), (tmp_path / ("n" * 300), 36)]:
        with pytest.raises(TierIOError, match="cannot open") as info:
            DirectFile(path)
        assert info.value.errno == code
        assert str(path) in str(info.value)
    assert capsys.readouterr().err == ""


def test_read_only_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * 4097)
    with DirectFile(tmp_path / "f", writable=False) as file:
        back = aligned(4097)
        file.read(back, 0)
        assert back == b"a" * 4097
        with pytest.raises(TierIOError):
            file.write(back, 0)


def test_threads_on_disjoint_pages(file: DirectFile) -> None:
    failures: list[int] = []

    def work(index: int) -> None:
        source, back = aligned(40_001, index), aligned(40_001)
        for turn in range(10):
            source[:] = pattern(40_001, index * 100 + turn)
            file.write(source, index * 64 * KiB, pad_tail=True)
            file.read(back, index * 64 * KiB)
            if back != source:
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_sto_05_forgotten_file_gives_its_descriptor_back(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "f")
    fd = file.fileno()
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
