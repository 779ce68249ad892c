"""Processes that are replaced as a whole: a due policy asks for a fresh process instead of a reload."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from modelguard import telemetry
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._evaluator import Due
from modelguard.lifecycle._policy import Policy, subset
from modelguard.telemetry.reasons import Reason

#: Asks the server for a fresh process.
Ask = Callable[[tuple[Reason, ...]], object]


class Recycling:
    """Whether and how one guard asks for a fresh process.

    Attributes:
        here: Whether this process is to be replaced, and not only its forked children.
        takes_calls: Whether calls run in this process. If not, only new weights matter here.
    """

    def __init__(self, guard: GuardContext[Any]) -> None:
        self._guard = guard
        self._ask: Ask | None = None
        self._renew: Callable[[], object] | None = None
        self._shares = False  # the model with a parent that loads new weights
        self.here = False
        self.takes_calls = True
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0  # the latest generation for which it was asked

    def in_children(self, ask: Ask, *, takes_calls: bool, renew: Callable[[], object] | None) -> None:
        """Children that are forked from now on call ``ask``, and ``renew`` instead of a reload, if it is given."""
        self._ask, self._renew = ask, renew
        self.takes_calls = takes_calls

    def in_this_process(self, ask: Ask) -> None:
        """This process calls ``ask`` from now on."""
        self._ask = ask
        self.here = True

    def after_fork_in_child(self) -> None:
        """A child shares its parent's model, so it asks where that was prepared."""
        self.here = self._shares = self._ask is not None
        self.takes_calls = True
        self._start()

    @property
    def renew(self) -> Callable[[], object] | None:
        """What asks the parent for new weights, instead of a reload in this process; None where that is not so."""
        return self._renew if self._shares else None

    @property
    def policy(self) -> Policy | None:
        """The part of the guard's policy that decides in this process.

        ``TTL``, ``Modified`` and ``Changed`` mean new weights, which a fresh child of the same parent would not have:
        they are the parent's business.
        """
        whole = self._guard.options.reload_on
        if not self.takes_calls:
            return subset(whole, renews=True)
        return subset(whole, renews=False) if self._shares else whole

    def request(self, due: Due[Any], generation: int) -> None:
        """Ask for a fresh process, once per generation.

        Raises:
            Exception: Whatever the server's callable raised.
        """
        with self._lock:
            if self._ask is None or self._asked >= generation:
                return
            self._asked = generation
        telemetry.emit(telemetry.RecycleAsked(guard=self._guard.name, generation=generation, reasons=due.reasons))
        self._ask(due.reasons)
