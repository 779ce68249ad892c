"""A thread pool for each user, so that users do not wait for each other; none is ever shut down."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

_executors: dict[str, ThreadPoolExecutor] = {}


def executor_of(user: str) -> ThreadPoolExecutor:
    if user not in _executors:
        _executors[user] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"user-{user}")
    return _executors[user]


def predict(user: str) -> int:
    return executor_of(user).submit(len, user).result()  # LEAK


def inputs() -> Iterator[str]:
    return (f"{number:06d}" for number in count())


EXPECTED = {"causes": ["threads"], "holders": ["_executors"], "calls": 800}
