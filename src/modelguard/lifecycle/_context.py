"""What the work on one guard has in common: its options, its state, and its access to the outside world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from modelguard.facts._proc import ShownPause, ShownVersion
from modelguard.lifecycle._state import GuardState

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions
    from modelguard.lifecycle._recorded_calls import RecordedCalls
    from modelguard.lifecycle.runtime import Runtime

M = TypeVar("M")


class GuardContext(Generic[M]):
    """One guard, as loading, evaluating and releasing see it.

    Attributes:
        options: Set once, but for the guard of molds (:meth:`~modelguard.lifecycle._engine.Engine.follow`).
        state: Changed by its own methods only.
        recorded: The calls that a reload repeats; None without ``replay``.
        shown: The version that ``modelguard top`` reads of this process.
        shown_pause: The pause that it reads.
        runtime: A test may replace it, to move a guard to another clock. Read it anew each time.
    """

    __slots__ = ("__weakref__", "options", "recorded", "runtime", "shown", "shown_pause", "state")

    def __init__(self, options: GuardOptions[M], state: GuardState[M], runtime: Runtime) -> None:
        self.options = options
        self.state = state
        self.runtime = runtime
        self.shown = ShownVersion(options.name)
        self.shown_pause = ShownPause(options.name)
        self.recorded = self._recorded_calls()

    def _recorded_calls(self) -> RecordedCalls | None:
        rule = self.options.swap.replay
        if rule is None:
            return None
        # Here, because few guards need it.
        from modelguard.lifecycle._recorded_calls import RecordedCalls

        return RecordedCalls(rule, self.state.enclosing)

    @property
    def name(self) -> str:
        """The guard's name, for events and errors."""
        return self.options.name
