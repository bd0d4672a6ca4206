"""Floor 2. Our own bounded threads for kernels over slices of arrays.

Owns the threads and the order of slices; knows no kernel and owns no array. Numba's ``parallel=True`` is not used: its
threading layers abort or hang under fork or when two threads enter them. See [Note: update threads] in docs/design.md.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from lightning_tieroffload.errors import ConfigError, TierOffloadError

__all__ = ["SLICE_MULTIPLE", "KernelPool", "default_num_threads", "slice_numel"]

SLICE_MULTIPLE = 4096
"""Slices begin at multiples of this many elements: whole tie bytes, whole cache lines, whole pages of 16-bit data."""

# A thread needs the interpreter lock once a slice, and may wait 5 ms for it while the trainer runs pure Python: so few
# slices, four a thread, enough for threads that the machine delays; and none so short that handing it out shows.
_SLICES_PER_THREAD = 4
_LEAST_SLICE_NUMEL = 16 * SLICE_MULTIPLE

SliceWork = Callable[[int, int], None]


def default_num_threads() -> int:
    """Threads to use unless told: the cores this process may run on, less two for the trainer and its loader.

    Counts the affinity mask (taskset, Slurm, one rank of many on a host), not the machine. With fewer than four cores
    all of them: the trainer waits while they work.
    """
    num_cores = len(os.sched_getaffinity(0))
    return num_cores - 2 if num_cores >= 4 else max(1, num_cores)


def slice_numel(numel: int, num_threads: int) -> int:
    """Elements a slice, a multiple of ``SLICE_MULTIPLE``. No result depends on it."""
    wanted = -(-numel // (num_threads * _SLICES_PER_THREAD))
    return max(_LEAST_SLICE_NUMEL, -(-wanted // SLICE_MULTIPLE) * SLICE_MULTIPLE)


class _Job:
    """One kernel over one set of arrays. All fields but ``work`` are guarded by the crew's lock."""

    __slots__ = ("begin", "error", "future", "num_running", "numel", "slice_numel", "work")

    def __init__(self, work: SliceWork, numel: int, slice_numel: int) -> None:
        self.work = work
        self.numel = numel
        self.slice_numel = slice_numel
        self.begin = 0  # first element that nobody has taken yet
        self.num_running = 0
        self.error: BaseException | None = None
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # so it cannot be cancelled: slices may be writing the arrays


class _Crew:
    """The threads of one process, with what they are to do. Threads hold the crew, not the pool."""

    def __init__(self, num_threads: int, cpus: frozenset[int] | None) -> None:
        self._cpus = cpus
        self._changed = threading.Condition()
        self._jobs: list[tuple[int, int, _Job]] = []  # a heap: (priority, order of arrival, job)
        self._order = itertools.count()
        self._closed = False
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []

    def submit(self, job: _Job, priority: int) -> None:
        with self._changed:
            if self._closed:
                raise TierOffloadError("this KernelPool is closed: an update was submitted after close().")
            if not self._threads:  # created by the first job, so that a pool costs nothing until it is used
                self._threads = [
                    threading.Thread(target=self._run, name=f"tieroffload-update-{index}", daemon=True)
                    for index in range(self._num_threads)
                ]
                for thread in self._threads:
                    thread.start()
            heapq.heappush(self._jobs, (priority, next(self._order), job))
            self._changed.notify_all()

    def is_mine(self) -> bool:
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let the threads finish what was submitted, then end them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.is_mine():  # a pool collected by one of its own threads: they end by themselves
            return
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # this thread alone
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs[0][2]
                begin, end = job.begin, min(job.begin + job.slice_numel, job.numel)
                job.begin = end
                job.num_running += 1
                if end == job.numel:
                    heapq.heappop(self._jobs)
            error: BaseException | None = None
            try:
                job.work(begin, end)
            except BaseException as caught:  # handed to whoever waits, whatever it is
                error = caught
            self._finish(job, error)
            del job, error  # an idle thread keeps no array alive

    def _finish(self, job: _Job, error: BaseException | None) -> None:
        with self._changed:
            job.num_running -= 1
            if error is not None and job.error is None:
                job.error = error
                if job.begin < job.numel:  # take no further slice of it
                    job.begin = job.numel
                    self._jobs = [entry for entry in self._jobs if entry[2] is not job]
                    heapq.heapify(self._jobs)
            # Complete only when nothing works on its arrays any more, failed or not.
            is_last = job.num_running == 0 and job.begin == job.numel
        if not is_last:
            return
        # Before anybody hears of it: threads that have not let go of the job yet would count as users of its arrays.
        del job.work
        if job.error is None:
            job.future.set_result(None)
        else:
            job.future.set_exception(job.error)


class KernelPool:
    """Runs work over slices of arrays on ``num_threads`` threads named ``tieroffload-update-N``.

    Results do not depend on the number of threads or on the slices, given that the work treats elements alike.
    ``cpus``: where its threads may run (a subset of the process's own mask; None: wherever the process may). Any
    thread may use it, several at once. Threads start with the first job. In a forked child the pool is empty and
    starts threads of its own; jobs of the parent do not exist there. ``close`` or the end of a ``with`` ends the
    threads, and so does losing the last reference, or the interpreter's exit.
    """

    def __init__(self, num_threads: int | None = None, *, cpus: frozenset[int] | None = None) -> None:
        if num_threads is None:
            num_threads = min(default_num_threads(), len(cpus)) if cpus else default_num_threads()
        if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
            raise ConfigError(
                f"num_threads={num_threads!r} of KernelPool must be a whole number of threads, at least 1."
            )
        self._num_threads = num_threads
        self._cpus = cpus
        self._closed = False
        # One crew per process: after fork, the parent's crew is here with its lock in any state, and no threads.
        self._crews: dict[int, _Crew] = {}
        self._finalizer = weakref.finalize(self, _close_crew_of_this_process, self._crews)

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def submit(self, work: SliceWork, numel: int, *, priority: int = 0, among_numel: int = 0) -> Future[None]:
        """Call ``work(begin, end)`` for slices that cover ``numel`` elements, in the pool's threads.

        Slices are so long that ``among_numel`` elements, of this and of jobs submitted together with it, keep every
        thread busy.
        Returns a future that is done when no slice is running or left. It carries the first exception that ``work``
        raised, after which no further slice is started. Among waiting jobs the lowest ``priority`` goes first, then
        the oldest; running slices are never interrupted. What ``work`` refers to must stay alive until then.
        """
        if self._closed:
            raise TierOffloadError("this KernelPool is closed: an update was submitted after close().")
        job = _Job(work, numel, slice_numel(max(numel, among_numel, 1), self._num_threads))
        if numel <= 0:
            job.future.set_result(None)
            return job.future
        crew = self._crew()
        if crew.is_mine():  # work that submits work: do it here, since waiting for ourselves would never end
            try:
                for begin in range(0, numel, job.slice_numel):
                    work(begin, min(begin + job.slice_numel, numel))
            except BaseException as caught:
                job.future.set_exception(caught)
            else:
                job.future.set_result(None)
            return job.future
        crew.submit(job, priority)
        return job.future

    def run(self, work: SliceWork, numel: int, *, priority: int = 0) -> None:
        """`submit`, then block the calling thread until it is done; raises what ``work`` raised."""
        self.submit(work, numel, priority=priority).result()

    def close(self) -> None:
        """Finish what was submitted and end the threads. Any thread may call, more than once."""
        self._closed = True
        _close_crew_of_this_process(self._crews)

    def __enter__(self) -> KernelPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _crew(self) -> _Crew:
        # setdefault is atomic, so two threads get one crew; and it takes no lock that fork could have left held.
        pid = os.getpid()
        return self._crews.get(pid) or self._crews.setdefault(pid, _Crew(self._num_threads, self._cpus))


def _close_crew_of_this_process(crews: dict[int, _Crew]) -> None:
    crew = crews.get(os.getpid())
    if crew is not None:
        crew.close()
