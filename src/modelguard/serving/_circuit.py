"""The circuit of a queue: what opens and closes it, and which request is its probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from modelguard.errors import CircuitOpen
from modelguard.serving._batches import Verdict
from modelguard.serving._requests import Request
from modelguard.serving.breaker import Circuit

__all__ = ["CircuitChange", "QueueCircuit"]

CircuitChange: TypeAlias = Literal["opened", "closed"] | None


class QueueCircuit:
    """A circuit, and the request that tries whether it can be closed. Without a breaker it is never open.

    Args:
        name: The batched function's name, for errors.
        circuit: The circuit; None without a breaker.

    Attributes:
        joining: Whether requests are being admitted that belong to one that has passed.
    """

    def __init__(self, name: str, circuit: Circuit | None) -> None:
        self._name = name
        self._circuit = circuit
        self._probe: Request | None = None
        self.joining = False

    def refusal(self, now: float) -> CircuitOpen | None:
        """The error for a request that must not pass now; None if it may."""
        circuit = self._circuit
        if circuit is None or circuit.state == "closed" or self.joining:  # the usual case, without a call
            return None
        pause = circuit.retry_after(now)
        if pause is None:
            return None
        return CircuitOpen(self._name, failures=circuit.failures, retry_after=pause)

    def admitted(self, request: Request) -> None:
        """Note that a request waits. It is the probe if the circuit is open."""
        if self._circuit is not None and self._circuit.state != "closed" and not self.joining:
            self._probe = request  # first: an exception may interrupt this at any point, and forget() has to know it
            self._circuit.admitted()

    def forget(self, request: Request) -> None:
        """Note that a request is not computed. If it was the probe, the next one is."""
        if request is self._probe and self._circuit is not None:
            self._probe = None
            self._circuit.probe_inconclusive()

    def batch_ended(self, requests: Sequence[Request], verdict: Verdict, now: float) -> CircuitChange:
        """Note what a batch says about the model. Returns what that changes."""
        circuit = self._circuit
        if circuit is None:
            return None
        probe = self._probe is not None and self._probe in requests
        if probe:
            self._probe = None
        if verdict == "succeeded":
            return "closed" if circuit.succeeded(probe=probe) else None
        if verdict == "failed":
            return "opened" if circuit.failed(now, probe=probe) else None
        if probe:
            circuit.probe_inconclusive()
        return None

    def trip(self, now: float) -> bool:
        """Open it at once. Returns whether there is one."""
        if self._circuit is None:
            return False
        self._circuit.trip(now)
        return True
