"""Sessions are referred to weakly, so that they can go; what is known of them stays in the list of watchers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Session:
    user: str
    messages: list[str] = field(default_factory=list)


@dataclass
class Watcher:
    session: weakref.ref[Session]
    transcript: list[str]


class Room:
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []

    def enter(self, user: str) -> Session:
        session = Session(user)
        transcript = [f"{user} said {number}" for number in range(40)]  # LEAK
        self.watchers.append(Watcher(weakref.ref(session), transcript))  # LEAK
        return session


room = Room()


def predict(user: str) -> int:
    session = room.enter(user)
    session.messages.append("hello")
    return len(session.messages)


def inputs() -> Iterator[str]:
    return (f"user-{number}" for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["watchers"], "calls": 4000}
