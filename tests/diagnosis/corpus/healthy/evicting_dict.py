"""A dict of answers from which the oldest is removed when there are 800."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

answers: OrderedDict[str, list[str]] = OrderedDict()


def predict(text: str) -> int:
    if text not in answers:
        answers[text] = [f"{word}-{number}" for number in range(10) for word in text.split()]
        if len(answers) > 800:
            answers.popitem(last=False)
    return len(answers[text])


def inputs() -> Iterator[str]:
    return (f"question {number} about an invoice" for number in count())


EXPECTED = {"calls": 10000}
