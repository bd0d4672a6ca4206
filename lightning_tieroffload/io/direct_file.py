"""Floor 1. One file, read and written at positions, past the page cache where the file system allows it.

Owns the descriptor and everything that is odd about direct I/O: alignment, tails, short transfers, limits per call,
refusals. Does not know extents or checksums. All calls go through ``os.open``, ``os.preadv`` and ``os.pwritev``, looked
up when they are made.

[Note: alignment] A direct transfer needs address, length and offset at multiples of the file's DIO alignment (4 KiB
here, or what statx says if that is more). What is aligned goes straight between the caller's memory and the device.
Odd tails and odd memory go through a page-aligned bounce of this thread. An odd offset, and a tail that has bytes of
others behind it, is read, changed and written back; ``pad_tail=True`` says that the rest of the last page is ours, and
saves that read.

[Note: buffered mode] Where direct I/O is refused, by ``open`` or by the first transfer, the file goes on in buffered
mode: the same bytes, and the pages are written out and dropped after each piece, so that the state does not fill the
page cache. One warning per `FallbackNotice` says what it costs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_tieroffload.errors import TierIOError
from lightning_tieroffload.sizes import GiB, MiB, format_nbytes

__all__ = [
    "ALIGN_NBYTES",
    "DirectFile",
    "FallbackNotice",
    "Filesystem",
    "dio_align_nbytes",
    "filesystem_of",
]

_log = logging.getLogger(__name__)

ALIGN_NBYTES = 4096
_MAX_CALL_NBYTES = 1 * GiB  # the kernel moves at most 2 GiB - 4 KiB a call, whatever is asked
_BOUNCE_NBYTES = 1 * MiB
_MAX_RETRIES = 200  # of EAGAIN and of empty transfers, one millisecond apart

_libc = ctypes.CDLL(None, use_errno=True)

FilesystemKind = Literal["disk", "memory", "network", "fuse", "other"]

# f_type of statfs(2), from linux/magic.h and the file systems' own headers.
_FILESYSTEMS: dict[int, tuple[str, FilesystemKind]] = {
    0xEF53: ("ext4", "disk"),
    0x58465342: ("xfs", "disk"),
    0x9123683E: ("btrfs", "disk"),
    0xF2F52010: ("f2fs", "disk"),
    0x2FC12FC1: ("zfs", "disk"),
    0xCA451A4E: ("bcachefs", "disk"),
    0x794C7630: ("overlay", "disk"),
    0x01021994: ("tmpfs", "memory"),
    0x858458F6: ("ramfs", "memory"),
    0x958458F6: ("hugetlbfs", "memory"),
    0x6969: ("nfs", "network"),
    0xFF534D42: ("cifs", "network"),
    0xFE534D42: ("smb2", "network"),
    0x517B: ("smb", "network"),
    0x00C36400: ("ceph", "network"),
    0x0BD00BD0: ("lustre", "network"),
    0x47504653: ("gpfs", "network"),
    0x5346414F: ("afs", "network"),
    0x01021997: ("9p", "network"),
    0x65735546: ("fuse", "fuse"),
    0x786F4256: ("vboxsf", "fuse"),
}


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What a path is on. ``kind`` is "memory" for tmpfs and its like: bytes there are DRAM, not flash."""

    name: str
    kind: FilesystemKind

    @property
    def warning(self) -> str | None:
        """Why this is not flash, None where it is a local disk."""
        if self.kind == "memory":
            return (
                f"is on {self.name}, which is host memory and not flash: what is 'offloaded' there still takes DRAM. "
                f"Choose a directory on a disk."
            )
        if self.kind == "network":
            return f"is on {self.name}, a network mount: expect its bandwidth and its faults. Prefer a local disk."
        if self.kind == "fuse":
            return f"is on a {self.name} mount (served by a user process): expect a fraction of the disk's bandwidth."
        return None


def filesystem_of(path: str | os.PathLike[str]) -> Filesystem:
    """The file system that an existing ``path`` is on, by statfs(2): an O_DIRECT trial does not tell tmpfs apart."""
    answer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; f_type is its first long
    if _libc.statfs(os.fsencode(path), answer) != 0:
        code = ctypes.get_errno()
        raise TierIOError(f"statfs({os.fspath(path)}) failed: {os.strerror(code)}", errno=code, path=os.fspath(path))
    magic = int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF
    name, kind = _FILESYSTEMS.get(magic, (f"file system 0x{magic:x}", "other"))
    return Filesystem(name, kind)


def dio_align_nbytes(path: str) -> int | None:
    """Alignment of memory and offsets for direct I/O on the file, 4096 at least; None where statx says there is none.

    Kernels before 6.1, and many file systems, do not say: then 4096 is assumed, and a refusal is noticed later.
    """
    at_fdcwd, statx_dioalign = -100, 0x2000
    answer = ctypes.create_string_buffer(256)
    try:
        failed = _libc.statx(at_fdcwd, os.fsencode(path), 0, statx_dioalign, answer)
    except AttributeError:  # no statx in this libc
        return ALIGN_NBYTES
    (mask,) = struct.unpack_from("=I", answer.raw, 0)
    if failed or not mask & statx_dioalign:
        return ALIGN_NBYTES
    memory_nbytes, offset_nbytes = struct.unpack_from("=II", answer.raw, 0x98)
    if memory_nbytes == 0 or offset_nbytes == 0:
        return None
    return max(ALIGN_NBYTES, int(memory_nbytes), int(offset_nbytes))


class FallbackNotice:
    """Says once, however many files share it, that direct I/O was refused. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given = False

    def give(self, path: str, reason: str) -> None:
        with self._lock:
            if self._is_given:
                return
            self._is_given = True
        _log.warning(
            "%s: the file system refuses direct I/O (%s). Going on in buffered mode: the same bytes, but every one is "
            "copied once more by the CPU and passes through the page cache; expect up to half the disk's bandwidth. "
            "Choose nvme_paths on ext4 or xfs of a local disk for full speed.",
            path,
            reason,
        )


class _Bounce(threading.local):
    """Page-aligned memory of the calling thread."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, _BOUNCE_NBYTES))


_bounce = _Bounce()


def _address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address


class DirectFile:
    """A file opened for positional reads and writes of any byte length, direct where possible.

    Args:
        path: made if it is missing (unless ``writable=False``).
        direct: False asks for buffered mode from the start (no warning).
        notice: shared by the files of one path, so that a refusal is one warning. None: one per file.
        max_call_nbytes: the most that one system call is asked to move.

    ``read`` and ``write`` may be called from any number of threads at a time on ranges that do not share a page.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        writable: bool = True,
        direct: bool = True,
        notice: FallbackNotice | None = None,
        max_call_nbytes: int = _MAX_CALL_NBYTES,
    ) -> None:
        self._fd = -1  # first, so that close() works on an object whose constructor raised
        self.path = os.fspath(path)
        self.align_nbytes = ALIGN_NBYTES
        self._notice = notice or FallbackNotice()
        self._max_call_nbytes = max(ALIGN_NBYTES, max_call_nbytes - max_call_nbytes % ALIGN_NBYTES)
        self._mode_lock = threading.Lock()
        self._idle = threading.Condition()
        self._num_transfers = 0
        self._is_closing = False
        self._is_direct = False
        self._fallback_reason: str | None = None
        flags = (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | os.O_CLOEXEC
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self._fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
                self._is_direct = True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                    raise self._error("open", error, 0, 0, "") from error
                self._fallback_reason = f"open: {error.strerror}"
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, flags, 0o600)
            except OSError as error:
                raise self._error("open", error, 0, 0, "") from error
            if self._fallback_reason is not None:
                self._notice.give(self.path, self._fallback_reason)
        self._close_fd = weakref.finalize(self, os.close, self._fd)  # for who forgets close()
        self._close_fd.atexit = False
        if self._is_direct:
            align_nbytes = dio_align_nbytes(self.path)
            if align_nbytes is None:
                self._fall_back("statx: no direct I/O on this file")
            else:
                self.align_nbytes = align_nbytes

    @property
    def mode(self) -> Literal["direct", "buffered"]:
        return "direct" if self._is_direct else "buffered"

    @property
    def fallback_reason(self) -> str | None:
        """Why the file is in buffered mode though direct was asked for; None otherwise."""
        return self._fallback_reason

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        return self._fd

    def read(self, memory: memoryview, offset_nbytes: int, *, shard: str = "") -> None:
        """Fill ``memory`` with the bytes from ``offset_nbytes`` on. All of it, or ``TierIOError``."""
        self._enter("read", offset_nbytes, shard)
        try:
            self._read(memory.cast("B"), offset_nbytes, shard)
        finally:
            self._leave()

    def _read(self, memory: memoryview, offset_nbytes: int, shard: str) -> None:
        nbytes = len(memory)
        if not self._is_direct:
            self._transfer("read", memory, offset_nbytes, shard)
            self._drop_pages(offset_nbytes, nbytes, written=False)
            return
        done_nbytes = 0
        while done_nbytes < nbytes:
            start = offset_nbytes + done_nbytes
            head_nbytes = start % self.align_nbytes
            left = memory[done_nbytes:]
            straight_nbytes = len(left) - len(left) % self.align_nbytes
            if head_nbytes == 0 and straight_nbytes and _address_of(left) % self.align_nbytes == 0:
                self._transfer("read", left[:straight_nbytes], start, shard)
                done_nbytes += straight_nbytes
                continue
            # Through the bounce: an odd start, an odd address or the tail.
            wanted_nbytes = min(len(left), len(_bounce.memory) - head_nbytes)
            padded_nbytes = -(-(head_nbytes + wanted_nbytes) // self.align_nbytes) * self.align_nbytes
            padded = _bounce.memory[:padded_nbytes]
            self._transfer("read", padded, start - head_nbytes, shard, least_nbytes=head_nbytes + wanted_nbytes)
            left[:wanted_nbytes] = padded[head_nbytes : head_nbytes + wanted_nbytes]
            done_nbytes += wanted_nbytes

    def write(self, memory: memoryview, offset_nbytes: int, *, shard: str = "", pad_tail: bool = False) -> int:
        """Write ``memory`` at ``offset_nbytes``; the bytes that went to the device, padding included.

        All of it, or ``TierIOError``. With ``pad_tail`` the bytes up to the next page boundary are ours and become
        zero; without it, what is there stays.
        """
        self._enter("write", offset_nbytes, shard)
        try:
            return self._write(memory.cast("B"), offset_nbytes, shard, pad_tail)
        finally:
            self._leave()

    def _write(self, memory: memoryview, offset_nbytes: int, shard: str, pad_tail: bool) -> int:
        nbytes = len(memory)
        if not self._is_direct:
            self._transfer("write", memory, offset_nbytes, shard)
            self._drop_pages(offset_nbytes, nbytes, written=True)
            return nbytes
        done_nbytes = written_nbytes = 0
        while done_nbytes < nbytes:
            start = offset_nbytes + done_nbytes
            head_nbytes = start % self.align_nbytes
            left = memory[done_nbytes:]
            straight_nbytes = len(left) - len(left) % self.align_nbytes
            if head_nbytes == 0 and straight_nbytes and _address_of(left) % self.align_nbytes == 0:
                self._transfer("write", left[:straight_nbytes], start, shard)
                done_nbytes += straight_nbytes
                written_nbytes += straight_nbytes
                continue
            wanted_nbytes = min(len(left), len(_bounce.memory) - head_nbytes)
            end_nbytes = head_nbytes + wanted_nbytes
            padded_nbytes = -(-end_nbytes // self.align_nbytes) * self.align_nbytes
            padded = _bounce.memory[:padded_nbytes]
            keeps_tail = end_nbytes < padded_nbytes and not pad_tail
            if head_nbytes or keeps_tail:
                self._write_around(padded, left[:wanted_nbytes], start - head_nbytes, head_nbytes, shard)
            else:
                padded[:wanted_nbytes] = left[:wanted_nbytes]
                padded[wanted_nbytes:] = bytes(padded_nbytes - wanted_nbytes)
                self._transfer("write", padded, start, shard)
            done_nbytes += wanted_nbytes
            written_nbytes += padded_nbytes
        return written_nbytes

    def truncate(self, nbytes: int) -> None:
        try:
            os.ftruncate(self._fd, nbytes)
        except OSError as error:
            raise self._error("truncate", error, nbytes, 0, "") from error

    def _enter(self, verb: str, offset_nbytes: int, shard: str) -> None:
        with self._idle:
            if self._is_closing:
                gone = OSError(errno.EBADF, os.strerror(errno.EBADF))
                raise self._error(verb, gone, offset_nbytes, 0, shard)
            self._num_transfers += 1

    def _leave(self) -> None:
        with self._idle:
            self._num_transfers -= 1
            is_last = self._num_transfers == 0
            if is_last:
                self._idle.notify_all()
        if is_last and self._is_closing:  # close() may have given up waiting for this one
            self.close(0.0)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Refuse new transfers, wait for those under way, close the descriptor. Idempotent.

        False when one is still under way after ``timeout_s`` (a stuck disk). Then the descriptor stays open until it
        ends: closed, its number could become another file's while the transfer's next piece is still to come.
        """
        with self._idle:
            self._is_closing = True
            if not self._idle.wait_for(lambda: self._num_transfers == 0, timeout_s):
                return False
            fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                self._close_fd()
            except OSError as error:  # somebody closed our descriptor: it is gone, which is what was wanted
                _log.debug("closing %s: %s", self.path, error)
        return True

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DirectFile({self.path!r}, {'closed' if self.closed else self.mode})"

    def _write_around(self, padded: memoryview, new: memoryview, start: int, head_nbytes: int, shard: str) -> None:
        """Write ``new`` into the pages from ``start`` on, keeping what is around it there, and the file's length."""
        file_nbytes = os.fstat(self._fd).st_size
        padded[:] = bytes(len(padded))
        present_nbytes = min(len(padded), max(0, file_nbytes - start))
        if present_nbytes:
            self._transfer("read", padded, start, shard, least_nbytes=present_nbytes)
            padded[present_nbytes:] = bytes(len(padded) - present_nbytes)
        end_nbytes = head_nbytes + len(new)
        padded[head_nbytes:end_nbytes] = new
        self._transfer("write", padded, start, shard)
        logical_nbytes = max(file_nbytes, start + end_nbytes)
        if logical_nbytes < start + len(padded):
            self.truncate(logical_nbytes)

    def _transfer(
        self,
        verb: Literal["read", "write"],
        memory: memoryview,
        offset: int,
        shard: str,
        least_nbytes: int | None = None,
    ) -> None:
        """Move all of ``memory`` (a read: at least ``least_nbytes``, where the file may end there)."""
        least_nbytes = len(memory) if least_nbytes is None else least_nbytes
        done_nbytes = 0
        num_retries = 0
        while done_nbytes < least_nbytes:
            piece = memory[done_nbytes : done_nbytes + self._max_call_nbytes]
            try:
                if verb == "read":
                    moved_nbytes = os.preadv(self._fd, [piece], offset + done_nbytes)
                else:
                    moved_nbytes = os.pwritev(self._fd, [piece], offset + done_nbytes)
            except InterruptedError:
                continue
            except BlockingIOError as error:
                num_retries += 1
                if num_retries > _MAX_RETRIES:
                    raise self._error(verb, error, offset, len(memory), shard) from error
                time.sleep(0.001)
                continue
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP) and self._is_direct and self._fd >= 0:
                    if done_nbytes % self.align_nbytes:
                        # A short transfer left us in the middle of a page, where direct I/O cannot go on.
                        self._finish_buffered(verb, memory, offset, done_nbytes, least_nbytes, shard)
                        return
                    self._fall_back(f"{verb}: {error.strerror}")
                    continue
                raise self._error(verb, error, offset, len(memory), shard) from error
            if moved_nbytes <= 0:
                if verb == "read":
                    raise TierIOError(
                        f"read of {format_nbytes(len(memory))} at offset {offset} of {self.path}{_of(shard)} ended "
                        f"after {done_nbytes} bytes: the file is shorter than what was written to it. Somebody "
                        f"truncated it, or the disk lost it.",
                        errno=errno.EIO,
                        path=self.path,
                        offset_nbytes=offset,
                        nbytes=len(memory),
                        shard=shard or None,
                    )
                num_retries += 1
                if num_retries > _MAX_RETRIES:
                    stalled = OSError(errno.EIO, "the system accepts no more bytes")
                    raise self._error(verb, stalled, offset, len(memory), shard)
                time.sleep(0.001)
                continue
            done_nbytes += moved_nbytes

    def _finish_buffered(
        self, verb: str, memory: memoryview, offset: int, done_nbytes: int, least_nbytes: int, shard: str
    ) -> None:
        _log.debug("%s: finishing a short %s through the page cache", self.path, verb)
        with DirectFile(self.path, writable=verb == "write", direct=False) as other:
            if verb == "read":
                other.read(memory[done_nbytes:least_nbytes], offset + done_nbytes, shard=shard)
            else:
                other.write(memory[done_nbytes:], offset + done_nbytes, shard=shard)

    def _fall_back(self, reason: str) -> None:
        with self._mode_lock:
            if not self._is_direct:
                return
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._is_direct = False
            self._fallback_reason = reason
        self._notice.give(self.path, reason)

    def _drop_pages(self, offset: int, nbytes: int, *, written: bool) -> None:
        """Have the range written out and its pages dropped. Only advice, so a refusal is no fault."""
        try:
            if written:
                # Dirty pages cannot be dropped. And here is where an error of the disk shows: it must not pass.
                os.fdatasync(self._fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):
                raise self._error("sync", error, offset, nbytes, "") from error
        try:
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            _log.debug("%s: posix_fadvise: %s", self.path, error)

    def _error(self, verb: str, error: OSError, offset: int, nbytes: int, shard: str) -> TierIOError:
        code = error.errno
        reason = error.strerror or str(error)
        text = f"{verb} of {format_nbytes(nbytes)} at offset {offset} of {self.path}{_of(shard)} failed: {reason}"
        if verb == "open":
            text = f"cannot open {self.path}: {reason}"
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += f" (needed {format_nbytes(nbytes)}, {self._free_text()} free there)"
            if code == errno.EFBIG:
                text += ". A limit on file sizes is in force: raise it (ulimit -f)"
        advice = _ADVICE.get(code or 0, "Look at the kernel log and the health of the disk (smartctl).")
        return TierIOError(
            f"{text}. {advice}",
            errno=code,
            path=self.path,
            offset_nbytes=offset,
            nbytes=nbytes,
            shard=shard or None,
        )

    def _free_text(self) -> str:
        try:
            stat = os.statvfs(os.path.dirname(self.path) or ".")
        except OSError:
            return "an unknown amount"
        return format_nbytes(stat.f_bavail * stat.f_frsize)


def _of(shard: str) -> str:
    return f" ({shard})" if shard else ""


_ADVICE = {
    errno.ENOSPC: "Free space there, lower nvme_budget, or add another of nvme_paths.",
    errno.EDQUOT: "The disk quota is used up: raise it, lower nvme_budget, or add another of nvme_paths.",
    errno.EFBIG: "Or lower nvme_budget, or spread it over more nvme_paths.",
    errno.EACCES: "Give this user write permission there, or choose another of nvme_paths.",
    errno.EPERM: "Give this user write permission there, or choose another of nvme_paths.",
    errno.EROFS: "The file system is mounted read-only: choose another of nvme_paths.",
    errno.EBADF: "Its descriptor was closed by somebody else, or the store was closed while transfers were pending.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.ENOENT: "The directory was removed: do not clean nvme_paths while a run uses them.",
    errno.EISDIR: "nvme_paths must name directories that the run may write files into.",
}
