"""The files of prometheus_client's multiprocess mode, under a server that replaces its workers.

Each process writes its counts into files of its own, and a scrape adds up all files that there are. The counts of a
worker that has ended must stay in the sums, so its files cannot be deleted; but a file for each worker that ever lived
makes scrapes slower and slower. So a new worker goes on with the files of one that has ended. That is one rename for
each file, which a scrape sees before or after: no count is missing, or there twice.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["MetricFiles"]

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
#: What is added up over all processes, dead ones included. Gauges are values of their own process.
_SUMMED = ("counter", "histogram", "summary")


class MetricFiles:
    """Which files are free to be taken over. Lives in the process that forks; a forked worker uses its copy once.

    Args:
        environment: Where the folder's variable is.

    Attributes:
        ended: The processes whose files may be free.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        folder = environment.get(_FOLDER)
        self._folder = None if folder is None else Path(folder)
        self.ended: list[int] = []

    def worker_ended(self, pid: int) -> None:
        """In the parent: a worker has ended. Its live gauges are removed, its counts go to a worker to come."""
        if self._folder is None or "prometheus_client" not in sys.modules:
            return
        importlib.import_module("prometheus_client.multiprocess").mark_process_dead(pid, str(self._folder))
        still_there = [each for each in self.ended if each != pid and any(map(Path.exists, self._files(each)))]
        self.ended = [*still_there, pid]

    def worker_started(self, pid: int) -> None:
        """In the parent: a process id is used again, and its files with it."""
        self.ended = [each for each in self.ended if each != pid]

    def take_over(self) -> None:
        """In a new worker, before its first metric: go on with the files of a worker that has ended.

        Another new worker may take the same one: only one of them can rename a file.
        """
        if self._folder is None:
            return
        own = self._files(os.getpid())
        if any(map(Path.exists, own)):  # this worker counts already, or had the same process id as one that has ended
            return
        for pid in self.ended:
            taken = [self._take(theirs, mine) for theirs, mine in zip(self._files(pid), own, strict=True)]
            if any(taken):
                return

    def _take(self, theirs: Path, mine: Path) -> bool:
        with suppress(OSError):  # there is none, or another worker was faster
            theirs.rename(mine)
            return True
        return False

    def _files(self, pid: int) -> list[Path]:
        folder = self._folder or Path()
        return [folder / f"{kind}_{pid}.db" for kind in _SUMMED]
