"""Floor 2. A private, locked directory under a path on flash: made, listed, reclaimed after a dead run, removed.

Owns the directory's name, its lock and its manifest. Everything here is scratch: nothing in it is worth anything to
another run, so a directory whose owner is dead is deleted, and only files that its manifest lists.

[Note: alive or dead] The owner holds flock(2) on the file "lock" for as long as it lives; the kernel lets go of it when
the process dies, however it dies. No process id is compared: containers reuse them. On network mounts, where locks
of other hosts may not be seen, only directories of this host are looked at.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
import time
import weakref

from lightning_tieroffload.errors import ConfigError, TierIOError
from lightning_tieroffload.io.direct_file import FallbackNotice, Filesystem, filesystem_of
from lightning_tieroffload.sizes import format_nbytes

__all__ = ["RunDirectory", "prepare_path", "reclaim_dead_runs"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_LOCK, _MANIFEST, _MANIFEST_DRAFT = "lock", "manifest.json", "manifest.json.tmp"
_OWN_FILES = (_MANIFEST_DRAFT, _MANIFEST, _LOCK)  # in the order of deletion: without its lock nobody may touch the rest
_NAME = re.compile(r"tieroffload-(?P<host>[A-Za-z0-9_.-]+)-(?P<pid>\d+)-r(?P<rank>\d+)-(?P<id>[0-9a-f]{12})")


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:64] or "host"


def prepare_path(path: str | os.PathLike[str]) -> str:
    """One of nvme_paths, made if it is missing: its absolute path.

    Raises ``ConfigError`` naming the option and the path.
    """
    text = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.fspath(path):
        raise ConfigError("nvme_paths holds an empty path. Name a directory on a local disk.")
    try:
        os.makedirs(text, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"nvme_paths: {text} is a file. Name a directory; it is made if it is missing.") from None
    except OSError as error:
        raise ConfigError(
            f"nvme_paths: {text} cannot be made: {error.strerror}. Name a directory that this user may make."
        ) from error
    if not os.path.isdir(text):
        raise ConfigError(f"nvme_paths: {text} is a file. Name a directory; it is made if it is missing.")
    return text


class RunDirectory:
    """One run's directory under ``parent``: ``tieroffload-<host>-<pid>-r<rank>-<random id>``.

    It vanishes with its files at ``close``, when the object dies, or at interpreter exit; after a crash the next run in
    the same parent removes it. A forked child has no part in it.
    """

    def __init__(self, parent: str, *, rank: int) -> None:
        self.parent = parent
        self.filesystem: Filesystem = filesystem_of(parent)
        self.notice = FallbackNotice()
        self._files: list[str] = []
        for _ in range(20):
            # A reclaiming run may take the directory for dead until it is locked: then it is made anew.
            self.path = os.path.join(parent, f"tieroffload-{_host_name()}-{os.getpid()}-r{rank}-{secrets.token_hex(6)}")
            lock_fd = self._make()
            if lock_fd is not None:
                break
        else:
            raise TierIOError(
                f"{parent}: could not make a directory that stays. Is something cleaning it?", path=parent
            )
        self._finalizer = weakref.finalize(self, _remove_run, self.path, lock_fd, os.getpid(), self._files)
        try:
            self._save_manifest()
        except BaseException:
            self.close()
            raise

    def _make(self) -> int | None:
        try:
            os.mkdir(self.path, 0o700)
        except OSError as error:
            raise ConfigError(
                f"nvme_paths: cannot make a directory in {self.parent}: {error.strerror}. Name a directory on a local "
                f"disk that this user may write to."
            ) from error
        lock_path = os.path.join(self.path, _LOCK)
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TierIOError(
                f"cannot make {lock_path}: {error.strerror}. Check nvme_paths.", errno=error.errno, path=lock_path
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(lock_path).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                os.close(fd)
                raise
            _log.warning("%s: the file system has no locks (%s); a crash here is not cleaned up", self.path, error)
            return fd
        os.close(fd)
        return None

    def add_file(self, name: str) -> str:
        """List ``name`` in the manifest and return its path. Call before making it: a crash leaves nothing unlisted."""
        self._files.append(name)
        self._save_manifest()
        return os.path.join(self.path, name)

    def _save_manifest(self) -> None:
        content = {
            "format": _FORMAT,
            "host": _host_name(),
            "pid": os.getpid(),
            "made_unix_s": time.time(),
            "files": self._files,
        }
        draft = os.path.join(self.path, _MANIFEST_DRAFT)
        try:
            with open(draft, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(draft, os.path.join(self.path, _MANIFEST))
        except OSError as error:
            raise TierIOError(
                f"cannot write {draft}: {error.strerror}. Check nvme_paths.", errno=error.errno, path=draft
            ) from error

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Delete the listed files and the directory, let go of the lock. Idempotent."""
        self._finalizer()


def _remove_run(path: str, lock_fd: int, owner_pid: int, files: list[str]) -> None:
    if os.getpid() != owner_pid:
        return
    try:
        _delete_listed(path, files)
    finally:
        os.close(lock_fd)


def _delete_listed(path: str, files: list[str]) -> None:
    for name in (*files, *_OWN_FILES):
        target = os.path.join(path, name)
        try:
            if stat.S_ISREG(os.lstat(target).st_mode) and name not in _OWN_FILES:
                os.truncate(target, 0)  # frees the space even while a forked worker holds the file open
            os.unlink(target)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("could not delete %s: %s", target, error.strerror)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning(
            "%s stays: it holds files that this package did not write (%s). Look at them and delete it.",
            path,
            error.strerror,
        )


def reclaim_dead_runs(parent: str) -> int:
    """Delete what dead runs left under ``parent``; the bytes freed. Live runs, and everything of others, stay."""
    is_network = filesystem_of(parent).kind == "network"
    freed_nbytes = 0
    for name in sorted(os.listdir(parent)):
        match = _NAME.fullmatch(name)
        if match is None or (is_network and match["host"] != _host_name()):
            continue
        path = os.path.join(parent, name)
        try:
            freed_nbytes += _reclaim_one(path)
        except OSError as error:
            _log.debug("%s was not reclaimed: %s", path, error)
    if freed_nbytes:
        _log.info("%s: reclaimed %s that dead runs had left", parent, format_nbytes(freed_nbytes))
    return freed_nbytes


def _reclaim_one(path: str) -> int:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        return 0
    try:
        lock_fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not os.listdir(path):
            os.rmdir(path)
        return 0
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # its owner lives
        files = _listed_files(path)
        freed_nbytes = 0
        for name in files:
            try:
                freed_nbytes += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
        _delete_listed(path, files)
        return freed_nbytes
    finally:
        os.close(lock_fd)


def _listed_files(path: str) -> list[str]:
    """Names from the manifest; none if it is missing or not ours. Only plain names: nothing outside is ever touched."""
    try:
        with open(os.path.join(path, _MANIFEST), encoding="utf-8") as file:
            content = json.load(file)
    except (FileNotFoundError, ValueError):
        return []
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return []
    names = content.get("files")
    if not isinstance(names, list):
        return []
    return [
        name
        for name in names
        if isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
    ]
