"""The extent store: nothing lost, nothing torn, nothing left (STO-01 to STO-16, MPR-03)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tieroffload.errors import CapacityError, ChecksumError, ConfigError, TierIOError, TierOffloadError
from lightning_tieroffload.io import extent_store, run_directory
from lightning_tieroffload.io.direct_file import DirectFile, filesystem_of
from lightning_tieroffload.io.extent_store import ExtentStore, partition_paths
from lightning_tieroffload.memory.free_runs import FreeRuns
from lightning_tieroffload.sizes import KiB, MiB

REPO = Path(__file__).parents[1]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def put(store: ExtentStore, name: str, content: bytes) -> None:
    store.write(name, memoryview(content))


def get(store: ExtentStore, name: str) -> bytes:
    memory = bytearray(store.nbytes_of(name))
    store.read(name, memoryview(memory))
    return bytes(memory)


def files_under(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


@pytest.fixture
def on_disk(tmp_path: Path) -> None:
    """Skips where the tests' directory is host memory: the store warns of that, and counts its bytes elsewhere."""
    if filesystem_of(tmp_path).kind == "memory":
        pytest.skip(f"{tmp_path} is on {filesystem_of(tmp_path).name}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExtentStore]:
    with ExtentStore([tmp_path / "nvme"], block_nbytes=64 * KiB) as opened:
        yield opened
    assert files_under(tmp_path / "nvme") == []


# --- bytes and layout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 3, 511, 513, 4004, 4095, 4096, 4097, 65535, 65536, 65537, 300_001])
@pytest.mark.parametrize("block_nbytes", [512, 4096, 1 * MiB])
@pytest.mark.parametrize("num_paths", [1, 3])
def test_sto_01_any_length_round_trips(tmp_path: Path, nbytes: int, block_nbytes: int, num_paths: int) -> None:
    with ExtentStore([tmp_path / str(i) for i in range(num_paths)], block_nbytes=block_nbytes) as store:
        neighbours = {"left": pattern(5000, 1), "shard": pattern(nbytes, 2), "right": pattern(77, 3)}
        store.reserve({name: len(content) for name, content in neighbours.items()})
        for _ in range(2):
            for name, content in neighbours.items():
                put(store, name, content)
        for name, content in neighbours.items():
            assert get(store, name) == content
            assert sum(piece.extent.nbytes for piece in store.pieces_of(name)) == len(content)
            assert all(piece.extent.offset_nbytes % 4096 == 0 for piece in store.pieces_of(name))


def test_pieces_are_striped_over_all_paths_and_contiguous_on_each(tmp_path: Path) -> None:
    with ExtentStore([tmp_path / str(i) for i in range(3)], block_nbytes=8 * KiB) as store:
        store.allocate("shard", 100 * KiB)
        pieces = store.pieces_of("shard")
        assert [piece.path_index for piece in pieces] == [i % 3 for i in range(13)]
        assert [piece.start_nbytes for piece in pieces] == list(range(0, 100 * KiB, 8 * KiB))
        for path_index in range(3):
            own = [piece.extent.offset_nbytes for piece in pieces if piece.path_index == path_index]
            assert own == [own[0] + i * 8 * KiB for i in range(len(own))]
        firsts = []
        for i in range(6):
            store.allocate(f"small {i}", 10)
            firsts.append(store.pieces_of(f"small {i}")[0].path_index)
        assert sorted(firsts) == [0, 0, 1, 1, 2, 2]  # small shards take turns


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_live_extents_never_overlap(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    base = tmp_path_factory.mktemp("nvme")
    with ExtentStore([base / "a", base / "b"], block_nbytes=rng.choice([4096, 16 * KiB])) as store:
        contents: dict[str, bytes] = {}
        for i in range(40):
            if contents and rng.random() < 0.4:
                name = rng.choice(sorted(contents))
                assert get(store, name) == contents.pop(name)
                store.free(name)
                continue
            name = f"shard {i}"
            contents[name] = rng.randbytes(rng.randint(0, 60_000))
            store.allocate(name, len(contents[name]), num_versions=rng.choice([1, 2]))
            put(store, name, contents[name])
        taken: list[tuple[str, int, int]] = []
        for name, content in contents.items():
            assert get(store, name) == content
        for shard in json.loads(store.index_json())["shards"].values():
            for place in shard["places"]:
                for path, offset, nbytes in place["extents"]:
                    end = offset + -(-nbytes // 4096) * 4096
                    assert not any(p == path and offset < e and s < end for p, s, e in taken)
                    taken.append((path, offset, end))
        assert store.used_nbytes == sum(end - start for _, start, end in taken)


def test_free_runs_reuse_space() -> None:
    runs = FreeRuns(100)
    assert [runs.cut(30, 1), runs.cut(30, 1), runs.cut(30, 1), runs.cut(30, 1)] == [0, 30, 60, None]
    runs.give(0, 30)
    runs.give(60, 30)
    assert (runs.longest_nbytes, runs.free_nbytes) == (40, 70)
    runs.give(30, 30)
    assert (runs.longest_nbytes, runs.free_nbytes) == (100, 100)
    assert runs.cut(10, 64) == 0
    assert runs.cut(30, 64) == 64


def test_sto_03_names_of_any_length_and_number(store: ExtentStore) -> None:
    names = ["x" * 400, "/".join(["deep"] * 200), "weird \n\0 ümlaut", *(f"layer.param.{i}" for i in range(3000))]
    store.reserve({name: 40 for name in names})
    for i, name in enumerate(names):
        put(store, name, pattern(40, i))
    for i, name in enumerate(names):
        assert get(store, name) == pattern(40, i)
    assert set(json.loads(store.index_json())["shards"]) == set(names)
    assert len(os.listdir(store.directories[0])) == 3  # files do not grow with the number of shards


def test_sto_13_required_bytes_are_what_is_then_used(store: ExtentStore) -> None:
    sizes = {"a": 1, "b": 4096, "c": 64 * KiB + 1, "d": 0, "e": 1_000_003}
    predicted_nbytes = sum(store.required_nbytes(nbytes, 2) for nbytes in sizes.values())
    store.reserve(sizes, num_versions=2)
    assert store.used_nbytes == predicted_nbytes == store.peak_nbytes
    assert Path(store.directories[0], "data-0").stat().st_blocks * 512 >= predicted_nbytes  # really reserved
    store.free("e")
    assert store.used_nbytes < predicted_nbytes == store.peak_nbytes


# --- versions -----------------------------------------------------------------------------------------------------


def test_two_versions_keep_the_old_one_until_commit_and_undo(store: ExtentStore) -> None:
    store.allocate("s", 100_000, num_versions=2)
    assert store.version_of("s") is None
    put(store, "s", pattern(100_000, 1))
    put(store, "s", pattern(100_000, 2))
    assert store.version_of("s") == 2
    writing = store.begin_write("s")
    assert get(store, "s") == pattern(100_000, 2)
    for piece in writing.pieces:
        writing.write_piece(piece.index, memoryview(bytes(piece.extent.nbytes)))
    assert get(store, "s") == pattern(100_000, 2)
    writing.abort()
    assert get(store, "s") == pattern(100_000, 2)
    with pytest.raises(TierIOError, match="no earlier version"):
        store.undo("s")  # the abandoned write took the old version's place
    put(store, "s", pattern(100_000, 3))
    store.undo("s")
    assert get(store, "s") == pattern(100_000, 2)
    assert store.version_of("s") == 2
    with pytest.raises(TierIOError, match="no earlier version"):
        store.undo("s")
    put(store, "s", pattern(100_000, 4))
    assert get(store, "s") == pattern(100_000, 4)
    assert store.version_of("s") == 4


def test_one_version_is_never_served_torn(store: ExtentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.allocate("s", 200_000)
    with pytest.raises(TierIOError, match="never written"):
        get(store, "s")
    put(store, "s", pattern(200_000, 1))
    writing = store.begin_write("s")
    with pytest.raises(TierIOError, match="being overwritten"):
        get(store, "s")
    with pytest.raises(TierIOError, match="two writers"):
        store.begin_write("s")
    with pytest.raises(TierIOError, match="being written"):
        store.free("s")
    writing.write_piece(0, memoryview(pattern(64 * KiB, 9)))
    with pytest.raises(TierIOError, match="3 of 4 pieces were not written"):
        writing.commit()
    writing.abort()
    with pytest.raises(TierIOError, match=r"given up.*last checkpoint"):
        get(store, "s")
    with pytest.raises(TierIOError, match="no earlier version"):
        store.undo("s")
    put(store, "s", pattern(200_000, 2))
    assert get(store, "s") == pattern(200_000, 2)
    with pytest.raises(TierIOError, match="ended already"):
        writing.commit()


def test_wrong_use_is_told(store: ExtentStore) -> None:
    store.allocate("s", 10)
    with pytest.raises(ValueError, match="already"):
        store.allocate("s", 10)
    with pytest.raises(ValueError, match="must be 1 or 2"):
        store.allocate("t", 10, num_versions=3)
    with pytest.raises(TierIOError, match="not in the store"):
        get(store, "unknown")
    writing = store.begin_write("s")
    with pytest.raises(ValueError, match="has 10 bytes, 9 were given"):
        writing.write_piece(0, memoryview(bytes(9)))
    writing.abort()
    assert "s" in store
    assert "unknown" not in store
    with pytest.raises(CapacityError, match="nvme_paths"):
        ExtentStore([])


# --- faults of the disk -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 70_000, 199_999])
def test_flipped_byte_is_a_checksum_error(store: ExtentStore, where: int) -> None:
    store.allocate("layers.3:exp_avg", 200_000)
    put(store, "layers.3:exp_avg", pattern(200_000))
    piece = next(p for p in store.pieces_of("layers.3:exp_avg") if p.start_nbytes + p.extent.nbytes > where)
    position = piece.extent.offset_nbytes + where - piece.start_nbytes
    with open(piece.extent.path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))
    with pytest.raises(ChecksumError) as info:
        get(store, "layers.3:exp_avg")
    error = info.value
    assert (error.shard, error.path, error.offset_nbytes, error.nbytes) == (
        "layers.3:exp_avg", piece.extent.path, piece.extent.offset_nbytes, piece.extent.nbytes,
    )  # fmt: skip
    for part in ("layers.3:exp_avg", piece.extent.path, "not the bytes that were written", "checkpoint"):
        assert part in str(error)


def test_verify_reads_off_does_not_check(tmp_path: Path) -> None:
    with ExtentStore([tmp_path], verify_reads=False) as store:
        store.allocate("s", 5000)
        put(store, "s", pattern(5000))
        with open(store.pieces_of("s")[0].extent.path, "r+b") as file:
            file.write(b"\xff")
        assert get(store, "s")[1:] == pattern(5000)[1:]


def test_neighbours_padding_is_not_checked(store: ExtentStore) -> None:
    """The checksum covers the shard's bytes; what lies in the padding is nobody's."""
    store.allocate("s", 100)
    put(store, "s", pattern(100))
    with open(store.pieces_of("s")[0].extent.path, "r+b") as file:
        file.seek(store.pieces_of("s")[0].extent.offset_nbytes + 100)
        file.write(b"\xff" * 3996)
    assert get(store, "s") == pattern(100)


def test_sto_02_no_space_on_call_seven(store: ExtentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0
    real = os.pwritev

    def fail(fd: int, buffers: Any, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    store.allocate("once", 10 * 64 * KiB)
    store.allocate("twice", 10 * 64 * KiB, num_versions=2)
    put(store, "twice", pattern(10 * 64 * KiB, 1))
    monkeypatch.setattr(os, "pwritev", fail)
    for name in ("once", "twice"):
        num_calls = 0
        with pytest.raises(TierIOError, match=r"No space left on device.*free there") as info:
            put(store, name, pattern(10 * 64 * KiB, 2))
        assert (info.value.errno, info.value.shard) == (errno.ENOSPC, name)
    with pytest.raises(TierIOError, match="writing it failed"):
        get(store, "once")
    assert get(store, "twice") == pattern(10 * 64 * KiB, 1)  # the version before stands


def test_sto_02_too_little_space_is_told_at_set_up(store: ExtentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    class OneMiB:
        f_bavail, f_frsize = 256, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: OneMiB())
    with pytest.raises(CapacityError, match=r"2 MiB more needed.*nvme_paths.*1 MiB is free") as info:
        store.reserve({"a": 512 * KiB, "b": 2 * MiB})
    assert store.paths[0] in str(info.value)
    assert store.used_nbytes == 0
    monkeypatch.setattr(os, "statvfs", real)
    store.reserve({"a": 512 * KiB, "b": 2 * MiB})


def test_sto_02_reservation_that_fails_leaves_the_store_usable(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(TierIOError, match=r"reserving 64 KiB.*No space left.*free there") as info:
            store.allocate("a", 64 * KiB)
    assert info.value.errno == errno.ENOSPC
    store.allocate("a", 64 * KiB)
    put(store, "a", pattern(64 * KiB))
    assert get(store, "a") == pattern(64 * KiB)


def test_sto_02_file_size_limit_at_set_up(store: ExtentStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KiB, hard))
    try:
        with pytest.raises(TierIOError, match="ulimit -f") as info:
            store.allocate("a", 128 * KiB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert info.value.errno == errno.EFBIG


def test_file_system_without_reservation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with ExtentStore([tmp_path]) as store:
        store.allocate("a", 100_000)
        put(store, "a", pattern(100_000))
        assert get(store, "a") == pattern(100_000)


def test_budget_names_the_least_that_would_do(tmp_path: Path) -> None:
    with ExtentStore([tmp_path], max_nbytes=100 * KiB) as store:
        store.allocate("a", 60 * KiB)
        with pytest.raises(CapacityError, match=r"nvme_budget \(100 KiB\).*at least 122880 bytes"):
            store.allocate("b", 60 * KiB)
        with pytest.raises(CapacityError, match="2 shards"):
            store.reserve({"b": 20 * KiB, "c": 30 * KiB})
        assert store.used_nbytes == 60 * KiB
        store.allocate("b", 40 * KiB)


def test_small_file_system_that_fills_up(tmp_path: Path) -> None:
    """A real, full ext4 image where this user may mount one; what is checked holds on any small file system."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 * MiB)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True)
    if (
        made.returncode
        or subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a file system image here")
    try:
        with ExtentStore([mount]) as store:
            store.allocate("a", 4 * MiB)
            put(store, "a", pattern(4 * MiB))
            with pytest.raises(CapacityError, match="is free there"):
                store.allocate("b", 64 * MiB)
            assert get(store, "a") == pattern(4 * MiB)
            # A neighbour fills the disk: what is reserved is ours and can still be written.
            with open(mount / "neighbour", "wb", buffering=0) as other, contextlib.suppress(OSError):
                while other.write(bytes(256 * KiB)):
                    pass
            assert os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize < 1 * MiB
            put(store, "a", pattern(4 * MiB, 2))
            assert get(store, "a") == pattern(4 * MiB, 2)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("verb", ["pread", "pwrite"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
def test_errors_of_the_disk_name_the_shard(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch, verb: str, code: int
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    store.allocate("u:param", 100)
    put(store, "u:param", pattern(100))
    monkeypatch.setattr(os, f"{verb}v", fail)
    with pytest.raises(TierIOError) as info:
        put(store, "u:param", pattern(100, 1)) if verb == "pwrite" else get(store, "u:param")
    assert (info.value.errno, info.value.shard) == (code, "u:param")


def test_truncated_file_is_an_error_and_removed_file_is_no_loss(store: ExtentStore) -> None:
    store.allocate("s", 100_000)
    put(store, "s", pattern(100_000))
    path = store.pieces_of("s")[0].extent.path
    os.unlink(path)
    assert get(store, "s") == pattern(100_000)  # the descriptor holds it
    put(store, "s", pattern(100_000, 1))
    assert get(store, "s") == pattern(100_000, 1)
    os.ftruncate(store._paths[0].file.fileno(), 50_000)
    with pytest.raises(TierIOError, match="shorter than what was written"):
        get(store, "s")


def test_sto_06_use_after_close_and_descriptor_closed_under_us(tmp_path: Path) -> None:
    store = ExtentStore([tmp_path])
    store.allocate("s", 100)
    put(store, "s", pattern(100))
    store.close()
    store.close()
    for call in (lambda: get(store, "s"), lambda: put(store, "s", pattern(100)), lambda: store.allocate("t", 1)):
        with pytest.raises(TierIOError, match="closed"):
            call()
    store = ExtentStore([tmp_path])
    store.allocate("s", 100)
    os.close(store._paths[0].file.fileno())
    with pytest.raises(TierIOError, match="Bad file descriptor"):
        put(store, "s", pattern(100))
    store.close()
    assert files_under(tmp_path) == []


def test_sto_06_close_waits_for_transfers_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ExtentStore([tmp_path])
    store.allocate("s", 100)
    put(store, "s", pattern(100))
    started, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def slow(*args: Any) -> int:
        started.set()
        assert go_on.wait(10)
        return real(*args)

    monkeypatch.setattr(os, "preadv", slow)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(get(store, "s")))
    reader.start()
    assert started.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    closer.join(10)
    reader.join(10)
    assert got == [pattern(100)]
    assert files_under(tmp_path) == []


def test_a_stuck_transfer_does_not_lose_its_descriptor_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed under a running transfer, the number could become another file's, and be written to."""
    started, go_on = threading.Event(), threading.Event()

    def stuck(*_: Any) -> int:
        started.set()
        assert go_on.wait(10)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = DirectFile(tmp_path / "f")
    fd = file.fileno()
    monkeypatch.setattr(os, "pwritev", stuck)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            file.write(memoryview(bytes(4096)), 0)
        except TierIOError as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert started.wait(10)
    assert file.close(timeout_s=0.01) is False
    os.fstat(fd)
    go_on.set()
    writer.join(10)
    assert len(errors) == 1
    assert file.closed, "the last transfer closes what close() had to leave open"
    assert file.close() is True
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.usefixtures("on_disk")
def test_sto_07_mode_is_told_and_buffered_store_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT and "/refuses/" in str(path):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with DirectFile(tmp_path / "f") as probe:
        if probe.mode != "direct":
            pytest.skip(f"no direct I/O in {tmp_path}")
    paths = [str(tmp_path / "takes"), str(tmp_path / "refuses")]
    with caplog.at_level(logging.WARNING), ExtentStore(paths, block_nbytes=16 * KiB) as store:
        assert store.mode_by_path == {paths[0]: "direct", paths[1]: "buffered"}
        store.allocate("s", 200_001)
        for seed in range(3):
            put(store, "s", pattern(200_001, seed))
            assert get(store, "s") == pattern(200_001, seed)
    assert len(caplog.records) == 1
    assert "refuses" in caplog.records[0].getMessage()


def test_sto_09_tmpfs_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/shm") / f"tieroffload-test-{os.getpid()}"
    try:
        with caplog.at_level(logging.WARNING), ExtentStore([path]) as store:
            store.allocate("s", 8192)
            put(store, "s", pattern(8192))
            assert get(store, "s") == pattern(8192)
            assert store.memory_nbytes == 8192
            assert store.filesystem_by_path[str(path)].kind == "memory"
        messages = [record.getMessage() for record in caplog.records]
        assert len([message for message in messages if "tmpfs" in message and str(path) in message]) == 1
    finally:
        path.rmdir()


@pytest.mark.usefixtures("on_disk")
def test_disk_paths_do_not_count_as_memory(store: ExtentStore) -> None:
    store.allocate("s", 8192)
    assert store.memory_nbytes == 0


# --- paths, directories, other runs ---------------------------------------------------------------------------------


def test_sto_12_paths_are_made_or_refused_with_option_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in ("relative/dir", "~/flash", tmp_path / "with space and ümlaut", str(tmp_path / "a" / "b" / "c")):
        with ExtentStore([path]) as store:
            assert os.path.isabs(store.paths[0])
            store.allocate("s", 5)
            put(store, "s", b"hello")
            assert get(store, "s") == b"hello"
    assert (tmp_path / "home" / "flash").is_dir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below", ""):
        with pytest.raises(ConfigError, match="nvme_paths") as info:
            ExtentStore([path])
        assert str(path) in str(info.value)


def test_sto_12_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: int = 0o777) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(run_directory.os, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"nvme_paths.*Permission denied") as info:
        ExtentStore([tmp_path])
    assert str(tmp_path) in str(info.value)
    assert files_under(tmp_path) == []


def test_a_disk_that_gives_back_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_store.DirectFile, "read", lambda self, memory, offset, shard="": None)
    with pytest.raises(ConfigError, match="does not give back"):
        ExtentStore([tmp_path])
    assert files_under(tmp_path) == []


def test_constructor_that_fails_halfway_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        ExtentStore([tmp_path / "good", tmp_path / "file"])
    assert files_under(tmp_path) == ["file", "good"]
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert capsys.readouterr().err == ""


def test_same_path_twice_is_one(tmp_path: Path) -> None:
    with ExtentStore([tmp_path, str(tmp_path) + "/"]) as store:
        assert store.paths == (str(tmp_path),)


def test_mpr_03_directories_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal paths, equal rank, even an equal process id on another host: separate directories, all alive."""
    stores = [ExtentStore([tmp_path], rank=3) for _ in range(2)]
    monkeypatch.setattr(run_directory.socket, "gethostname", lambda: "other/host")
    stores.append(ExtentStore([tmp_path], rank=3))
    names = [os.path.basename(store.directories[0]) for store in stores]
    assert len(set(names)) == 3
    assert all(f"-{os.getpid()}-r3-" in name for name in names)
    assert "other_host" in names[2]
    for i, store in enumerate(stores):
        store.allocate("s", 100)
        put(store, "s", pattern(100, i))
    for i, store in enumerate(stores):
        assert get(store, "s") == pattern(100, i)
    for store in stores:
        store.close()
    assert files_under(tmp_path) == []


def test_partition_of_paths_over_ranks() -> None:
    paths = [f"/n{i}" for i in range(4)]
    assert [partition_paths(paths, rank, 2) for rank in range(2)] == [("/n0", "/n2"), ("/n1", "/n3")]
    assert [partition_paths(paths, rank, 3) for rank in range(3)] == [("/n0", "/n3"), ("/n1",), ("/n2",)]
    assert [partition_paths(paths[:2], rank, 5) for rank in range(5)] == [
        ("/n0",),
        ("/n1",),
        ("/n0",),
        ("/n1",),
        ("/n0",),
    ]
    assert partition_paths([], 0, 1) == ()
    assert partition_paths(paths, 0, 1) == tuple(paths)


def dead_run(tmp_path: Path, *, manifest: object = None, files: tuple[str, ...] = ("data-0",)) -> Path:
    path = tmp_path / "tieroffload-somehost-4242-r0-0123456789ab"
    path.mkdir()
    (path / "lock").touch()
    if manifest is not None:
        (path / "manifest.json").write_text(json.dumps(manifest))
    for name in files:
        (path / name).write_bytes(bytes(8192))
    return path


def test_dead_run_is_reclaimed(tmp_path: Path) -> None:
    path = dead_run(tmp_path, manifest={"format": 1, "files": ["data-0", "data-1"]})
    with ExtentStore([tmp_path]) as store:
        assert not path.exists()
        assert store.reclaimed_nbytes == 8192


def test_only_listed_files_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("keep")
    path = dead_run(
        tmp_path,
        manifest={"format": 1, "files": ["data-0", "../treasure", str(treasure), "..", "", 7]},
        files=("data-0", "thesis.tex"),
    )
    foreign = tmp_path / "tieroffload-notours"
    foreign.mkdir()
    (foreign / "data-0").touch()
    with caplog.at_level(logging.WARNING):
        ExtentStore([tmp_path]).close()
    assert files_under(tmp_path) == sorted(
        [path.name, f"{path.name}/thesis.tex", "tieroffload-notours", "tieroffload-notours/data-0", "treasure"]
    )
    assert "did not write" in caplog.text


@pytest.mark.parametrize("manifest", [None, [], {"format": 99, "files": ["data-0"]}, {"format": 1, "files": "data-0"}])
def test_unknown_manifest_deletes_nothing_of_others(tmp_path: Path, manifest: object) -> None:
    path = dead_run(tmp_path, manifest=manifest)
    ExtentStore([tmp_path]).close()
    assert (path / "data-0").exists()


def test_run_that_died_before_its_manifest_is_reclaimed(tmp_path: Path) -> None:
    first = dead_run(tmp_path, files=())
    empty = tmp_path / "tieroffload-somehost-1-r0-0123456789aa"
    empty.mkdir()
    ExtentStore([tmp_path]).close()
    assert not first.exists()
    assert not empty.exists()


def test_live_run_is_respected(tmp_path: Path) -> None:
    path = dead_run(tmp_path, manifest={"format": 1, "files": ["data-0"]})
    with open(path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ExtentStore([tmp_path]).close()
        assert (path / "data-0").exists()
    ExtentStore([tmp_path]).close()
    assert not path.exists()


def test_other_hosts_directories_on_network_mounts_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dead_run(tmp_path, manifest={"format": 1, "files": ["data-0"]})
    nfs = run_directory.Filesystem("nfs", "network")
    monkeypatch.setattr(run_directory, "filesystem_of", lambda _: nfs)
    ExtentStore([tmp_path]).close()
    assert (path / "data-0").exists()


def test_directory_lost_to_a_reclaiming_run_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between mkdir and flock another run may take ours for dead; then a new one is made."""
    real = fcntl.flock
    num_taken = 0

    def take_away(fd: int, how: int) -> None:
        nonlocal num_taken
        if num_taken < 2:
            num_taken += 1
            lock = os.readlink(f"/proc/self/fd/{fd}")
            os.unlink(lock)
            os.rmdir(os.path.dirname(lock))
        real(fd, how)

    monkeypatch.setattr(run_directory.fcntl, "flock", take_away)
    with ExtentStore([tmp_path]) as store:
        store.allocate("s", 10)
        put(store, "s", pattern(10))
        assert get(store, "s") == pattern(10)
    assert files_under(tmp_path) == []


def test_manifest_lists_every_file_before_it_exists(tmp_path: Path) -> None:
    with ExtentStore([tmp_path]) as store:
        directory = Path(store.directories[0])
        manifest = json.loads((directory / "manifest.json").read_text())
        assert manifest["pid"] == os.getpid()
        assert set(os.listdir(directory)) == {"lock", "manifest.json", *manifest["files"]}


# --- descriptors, processes, exit -----------------------------------------------------------------------------------


def test_sto_05_descriptors_are_constant(tmp_path: Path) -> None:
    def open_files() -> tuple[int, int]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return len(links), sum(link.endswith("(deleted)") for link in links)

    before = open_files()
    for _ in range(3):
        with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=4096) as store:
            store.reserve({str(i): 6000 for i in range(20)}, num_versions=2)
            counts = set()
            for step in range(50):
                for name in ("1", "7", "19"):
                    put(store, name, pattern(6000, step))
                    assert get(store, name) == pattern(6000, step)
                counts.add(open_files())
            assert len(counts) == 1
            assert counts.pop()[0] - before[0] == 4  # a data file and a lock for each path
    assert open_files() == before


def run_python(code: str, args: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], cwd=REPO, capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("on_disk")
def test_sto_05_sixty_four_descriptors_are_enough(tmp_path: Path) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from lightning_tieroffload.io.extent_store import ExtentStore
with ExtentStore([{str(tmp_path)!r}]) as store:
    store.reserve({{str(i): 5000 for i in range(300)}})
    for i in range(300):
        store.write(str(i), memoryview(bytes([i % 256]) * 5000))
    for i in range(300):
        memory = bytearray(5000)
        store.read(str(i), memoryview(memory))
        assert memory == bytes([i % 256]) * 5000
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('mine')", "del store", "os.kill(os.getpid(), 2)"])
def test_con_05_any_clean_end_leaves_no_file(tmp_path: Path, end: str) -> None:
    code = f"""
import os, sys
from lightning_tieroffload.io.extent_store import ExtentStore
store = ExtentStore([{str(tmp_path)!r}])
store.allocate("s", 100000)
store.write("s", memoryview(bytes(100000)))
{end}
"""
    run_python(code)
    assert files_under(tmp_path) == []


def test_forked_child_deletes_nothing(tmp_path: Path) -> None:
    store = ExtentStore([tmp_path])
    store.allocate("s", 100)
    put(store, "s", pattern(100))
    directory = store._paths[0].directory
    pid = os.fork()
    if pid == 0:
        directory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert get(store, "s") == pattern(100)
    assert Path(store.directories[0], "data-0").exists()
    store.close()
    assert files_under(tmp_path) == []


WRITER = """
import os, random, signal, sys, time
from lightning_tieroffload.io.extent_store import ExtentStore

def work(path):
    while True:
        with ExtentStore([path], block_nbytes=16384) as store:
            print(store.reclaimed_nbytes, flush=True)
            for i in range(20):
                store.allocate(str(i), 50_000, num_versions=1 + i % 2)
                for turn in range(3):
                    store.write(str(i), memoryview(bytes([turn]) * 50_000))
                    memory = bytearray(50_000)
                    store.read(str(i), memoryview(memory))
                    if memory != bytes([turn]) * 50_000:
                        sys.exit(9)
"""
KILLER = """
rng = random.Random(0)
path = sys.argv[1]
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        sys.stdout = open(os.devnull, "w")
        work(path)
    time.sleep(rng.random() * 0.06)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    with ExtentStore([path]) as store:
        assert len(os.listdir(path)) == 1, os.listdir(path)
        store.allocate("s", 10_000)
        store.write("s", memoryview(b"x" * 10_000))
        memory = bytearray(10_000)
        store.read("s", memoryview(memory))
        assert memory == b"x" * 10_000
    print(store.reclaimed_nbytes)
"""


@pytest.mark.usefixtures("on_disk")
def test_sto_16_kill_nine_at_random_moments_then_a_fresh_run(tmp_path: Path) -> None:
    """20 kills; after each, a run in the same path starts at once, works, and what the dead one left is gone."""
    done = run_python(WRITER + KILLER, args=[str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    reclaimed = [int(line) for line in done.stdout.split()]
    assert len(reclaimed) == 20
    assert sum(nbytes > 0 for nbytes in reclaimed) >= 5  # the kills really hit in the middle
    assert files_under(tmp_path) == []


@pytest.mark.usefixtures("on_disk")
def test_two_processes_share_a_path(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER + "work(sys.argv[1])", str(tmp_path)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    reclaimed: list[int] = []
    for process in processes:
        assert process.stdout is not None
        reclaimed.extend(int(process.stdout.readline()) for _ in range(5))
    for process in processes:
        process.kill()
        assert process.communicate(timeout=10)[1] == b""
    assert reclaimed == [0] * 10  # nobody takes a live run for dead
    ExtentStore([tmp_path]).close()
    assert files_under(tmp_path) == []


def test_sto_14_needs_no_optional_kernel_facility() -> None:
    """No io_uring, no libaio: only positional reads and writes from threads."""
    sources = "".join(path.read_text() for path in (REPO / "lightning_tieroffload" / "io").glob("*.py"))
    assert not any(word in sources for word in ("io_setup", "liburing", "libaio"))


# --- endurance accounting -------------------------------------------------------------------------------------------


def test_written_bytes_are_counted_per_path_padding_included(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    with ExtentStore(paths, block_nbytes=8192) as store:
        store.allocate("s", 3 * 8192 + 5)
        put(store, "s", bytes(3 * 8192 + 5))
        put(store, "s", bytes(3 * 8192 + 5))
        get(store, "s")
        assert store.written_nbytes_by_path == {paths[0]: 4 * 8192, paths[1]: 2 * (8192 + 4096)}
        assert store.read_nbytes_by_path == {paths[0]: 2 * 8192, paths[1]: 8192 + 4096}


def test_write_budget_stops_before_it_is_exceeded(tmp_path: Path) -> None:
    with ExtentStore([tmp_path], write_budget_nbytes=20_000) as store:
        store.allocate("s", 8000, num_versions=2)
        put(store, "s", pattern(8000, 1))
        put(store, "s", pattern(8000, 2))
        with pytest.raises(CapacityError, match=r"nvme_write_budget \(19.5 KiB\): 16 KiB are written"):
            put(store, "s", pattern(8000, 3))
        assert sum(store.written_nbytes_by_path.values()) == 16384
        assert get(store, "s") == pattern(8000, 2)


def test_every_error_of_the_store_is_one_of_ours() -> None:
    assert all(issubclass(kind, TierOffloadError) for kind in (CapacityError, ChecksumError, ConfigError, TierIOError))
