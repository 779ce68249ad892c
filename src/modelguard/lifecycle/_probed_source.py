"""What a probe has returned so far, and whether that is a change. It starts no thread and reads no clock."""

from __future__ import annotations

__all__ = ["UNKNOWN", "ProbedSource"]

#: Stands for a value that no probe has returned.
UNKNOWN = object()

#: A change counts when so many polls in a row have returned the same new value.
FEWEST = 2
#: As many at most, when earlier changes did not last.
MOST = 64
#: A change that was loaded has lasted if so many answers in a row were the same as at the load.
LASTING = 10
#: After so many new values that were not confirmed, the probe counts as unsteady.
UNSTEADY = 5


class ProbedSource:
    """The answers of one probe, compared with that at the load of the current generation."""

    def __init__(self) -> None:
        self._at_load: object = UNKNOWN
        self._latest: object = UNKNOWN
        self._needed = FEWEST
        self._same = self._longest = 0  # answers in a row, since the load, that were the same as at the load
        self._counted = False  # a change since the load
        self._candidate: object = UNKNOWN
        self._in_a_row = 0
        self._unconfirmed = 0

    def loaded(self, value: object) -> None:
        """A generation was loaded, and just before that the probe returned ``value``.

        Args:
            value: ``UNKNOWN`` if the probe did not answer. Then the latest answer counts, or else the next one.
        """
        if self._counted:
            lasted = self._longest >= max(LASTING, 2 * self._needed)
            self._needed = FEWEST if lasted else min(MOST, self._needed * 2)
        self._at_load = self._latest if value is UNKNOWN else value
        self._latest = self._at_load
        self._same = self._longest = 0
        self._counted = False
        self._forget_candidate()

    def answered(self, value: object) -> None:
        """A poll has returned ``value``.

        Raises:
            Exception: The value cannot be compared.
        """
        if self._at_load is UNKNOWN:
            self._at_load = value
        same, as_before = _equal(value, self._at_load), _equal(value, self._candidate)
        self._latest = value
        if same:
            self._same += 1
            self._longest = max(self._longest, self._same)
            self._forget_candidate(steady=self._in_a_row == 0)
        elif as_before:
            self._in_a_row += 1
        else:
            self._same = 0
            self._candidate, self._in_a_row = value, 1
            self._unconfirmed = min(self._unconfirmed + 1, UNSTEADY)
        if self.changed:
            self._counted, self._unconfirmed = True, 0

    @property
    def changed(self) -> bool:
        """Whether the value is another one than at the load, often enough in a row."""
        return self._in_a_row >= self._needed

    @property
    def unsteady(self) -> bool:
        """Whether new values come and go before they count."""
        return self._unconfirmed >= UNSTEADY

    @property
    def expects_confirmation(self) -> bool:
        """Whether the next answer should come soon."""
        return 0 < self._in_a_row < self._needed and not self.unsteady

    def _forget_candidate(self, *, steady: bool = True) -> None:
        self._candidate, self._in_a_row = UNKNOWN, 0
        if steady:
            self._unconfirmed = max(0, self._unconfirmed - 1)


def _equal(one: object, other: object) -> bool:
    return one is other or (other is not UNKNOWN and bool(one == other))
