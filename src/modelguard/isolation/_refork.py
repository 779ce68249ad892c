"""A worker takes the place of its mold, so that what its calls have filled is shared too: the owner's side of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._supervisor import Supervisor
from modelguard.isolation._worker import BECOME_MOLD
from modelguard.isolation._worker_process import Worker

__all__ = ["FormerMold", "Promotion"]

#: Seconds that a worker may take to become a mold, the trial of its warm-up included.
_PROMOTION = 60.0


class Promotion:
    """Asks an idle worker to become a mold. All of it happens in the supervisor's thread.

    Args:
        worker: It takes no calls meanwhile.
        supervisor: Watches it.
        on_ready: Called with the channel to the new mold.
        on_refused: Called with the reason if the worker cannot fork; it can serve on.
    """

    def __init__(
        self,
        worker: Worker,
        supervisor: Supervisor,
        *,
        on_ready: Callable[[Channel], object],
        on_refused: Callable[[str], object],
    ) -> None:
        self._worker = worker
        self._supervisor = supervisor
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._control: Channel | None = None
        self._cancelled = False

    def begin(self) -> None:
        """Ask it."""
        if self._cancelled:
            return
        try:
            ours, theirs = pair()
        except OSError as error:  # no descriptor is left
            self._on_refused(str(error))
            return
        control = self._control = Channel(ours)
        self._supervisor.watch(control.fileno(), lambda: self._hear(control))
        with theirs, suppress(OSError):  # a worker that is gone closes the other end
            self._worker.channel.send(BECOME_MOLD, [theirs.fileno()])
        kept: weakref.ref[Promotion] = weakref.ref(self)  # by the watch, until it has been heard
        self._supervisor.later(_PROMOTION, lambda: _end_late(kept))

    def _hear(self, control: Channel) -> None:
        self._supervisor.forget(control.fileno())
        try:
            what, *details = control.receive()
        except (EOFError, OSError):  # its mold reports how it ended
            self.cancel()
            return
        if what == "ready":
            self._on_ready(control)
            return
        control.close()
        self._on_refused(_in_one_line(*details))

    def cancel(self) -> None:
        """The worker has ended, or is ending."""
        self._cancelled = True
        self._worker.channel.close()
        if self._control is not None:
            self._supervisor.forget(self._control.fileno())
            self._control.close()

    def end_worker(self) -> None:
        """It takes too long."""
        self._worker.kill()


def _end_late(promotion: weakref.ref[Promotion]) -> None:
    one = promotion()
    if one is not None:
        one.end_worker()


class FormerMold:
    """The process that has loaded the model, after a worker has taken its place.

    Its last workers report to it. When they have ended, it gives back its memory: all that is left of it is a small
    program that waits for the new mold's end.

    Args:
        control: The channel to it.
        workers: The numbers of its workers that still run.
    """

    def __init__(self, control: Channel, workers: set[int]) -> None:
        self.control = control
        self._workers = workers
        self._asked = False

    @property
    def may_close(self) -> bool:
        """Whether the end of its channel is what was asked for."""
        return self._asked

    def worker_ended(self, number: int) -> None:
        """One of its workers has ended."""
        self._workers.discard(number)
        if not self._workers and not self._asked:
            self._asked = True
            with suppress(OSError):  # it has ended, and that is noticed by itself
                self.control.send(("retire", 0))


def _in_one_line(error: BaseException, traceback: object) -> str:
    del traceback
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
