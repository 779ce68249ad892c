"""A batch raised: find the items at fault with few runs, and answer the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from modelguard.serving._suspects import named_by

__all__ = ["Isolation", "Run"]

#: Of so many items that were found bad, one run tests about as many that it succeeds every second time: ln 2.
_EVEN = 0.7


class Run(Protocol):
    """Runs the batch function on some items of the batch, by their numbers."""

    def __call__(self, part: list[int]) -> BaseException | None:
        """Run it, and keep the results. Returns what it raised."""


class Isolation:
    """Runs parts of a batch that raised, until each error belongs to one item or the model turns out to be at fault.

    * The innermost function in the traceback often works on a single item. The others run without it first: if they
      succeed, one run was enough.
    * Otherwise halves: of a part that raised, one half runs. If it succeeds, the other half holds the item at fault,
      and is halved without a run of its own. If it raises, nothing is known of the other half any more, and it runs
      later, with all others like it.
    * If nothing has succeeded after ``2 log2(n) + 1`` runs, the model is at fault. There are never more than
      ``4 log2(n) + 4`` runs: with more bad items than can be found with these, the rest is refused.

    Args:
        run: Runs a part.
        live: Whether an item's caller still waits.
        items: All items.
        trust: Whether to believe tracebacks.
        breaks: Whether an error concerns the whole batch, so that every other part would get it as well.
    """

    def __init__(
        self,
        run: Run,
        live: Callable[[int], bool],
        items: list[Any],
        *,
        trust: bool,
        breaks: Callable[[BaseException], bool],
    ) -> None:
        self._run = run
        self._live = live
        self._items = items
        self._trust = trust
        self._breaks = breaks
        self.bad: dict[int, BaseException] = {}
        self.unfound: list[int] = []
        self.broken: dict[int, BaseException] = {}
        self.succeeded = False
        self.named_right: bool | None = None
        self.reruns = 0
        self._parts_failed = 0

    def find(self, part: list[int], error: BaseException) -> None:
        """Answer all items of a part that raised this error.

        Afterwards ``bad`` has the items at fault with their errors, ``broken`` those that failed with all others, and
        ``unfound`` those that were not told apart.
        """
        bits = (len(part) - 1).bit_length()
        self._first, self._most, self._most_failures = error, 4 * bits + 4, 2 * bits + 1
        if self._trust:
            part, error = self._leave_out_named(part, error)
        suspected, raised, rest = part, 1, list[int]()
        while suspected or rest:
            if not self.succeeded and self.reruns >= self._most_failures:
                self._all_fail([*suspected, *rest])
                return
            if self.reruns >= self._most:
                self.unfound = [at for at in (*suspected, *rest) if self._live(at)]
                return
            living = [at for at in suspected if self._live(at)]
            if len(living) < len(suspected):  # the item at fault may be among those that are gone
                suspected, rest = [], living + rest
                continue
            rest = [at for at in rest if self._live(at)]
            if not suspected:
                size = self._even_size(len(rest))
                suspected, rest, raised = rest[:size], rest[size:], 1
                failed = self._try(suspected) if suspected else None
                if failed is None:
                    suspected = []
                else:
                    error = failed
                continue
            if len(suspected) == 1:
                self._judge(suspected[0], error, certain=raised > 1)
                suspected = []
                continue
            half = suspected[: len(suspected) // 2]
            failed = self._try(half)
            if failed is None:
                suspected = suspected[len(half) :]
            else:
                suspected, rest, raised, error = half, suspected[len(half) :] + rest, raised + 1, failed

    def _leave_out_named(self, part: list[int], error: BaseException) -> tuple[list[int], BaseException]:
        """Run the part without what the traceback names, again and again. Returns a part that still raises, if any."""
        named: dict[int, BaseException] = {}
        while part and len(named) <= 2 + len(self._items) // 8:
            found = [part[at] for at in named_by(error, [self._items[at] for at in part])]
            if len(found) != 1:
                break
            named[found[0]] = error
            part = [at for at in part if at not in named and self._live(at)]
            failed = self._try(part) if part else None
            if failed is None:
                self.named_right = True
                self.bad.update(named)
                return [], error
            error = failed
        if named:
            self.named_right = False
            for at, its_error in named.items():
                if self._live(at):
                    self._judge(at, its_error, certain=False)
        return part, error

    def _judge(self, at: int, error: BaseException, *, certain: bool) -> None:
        """The item at fault, if the run that raised was not an accident: it fails by itself too."""
        failed: BaseException | None = error if certain else self._try([at])
        if failed is not None and at not in self.broken:
            self.bad[at] = failed

    def _try(self, part: list[int]) -> BaseException | None:
        self.reruns += 1
        failed = self._run(part)
        if failed is None:
            self.succeeded = True
            return None
        self._parts_failed += 1
        if self._breaks(failed):
            self.broken.update(dict.fromkeys(part, failed))
            return None
        return failed

    def _all_fail(self, part: list[int]) -> None:
        self.broken.update(dict.fromkeys([at for at in part if self._live(at)], self._first))

    def _even_size(self, count: int) -> int:
        """How many items, about which nothing is known, run together."""
        found = len(self.bad)
        if found <= 1:
            return count
        tested = max(len(self._items) - count, 1)
        return max(1, min(count, int(_EVEN * tested / found)))
