"""``_fairness`` behind the queue: shares of keys, priorities, quotas, and who gives way when the queue is full."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.serving.queues import measure, queue_of, request, run, taken

from modelguard.errors import DeadlineUnreachable, QueueFull, QuotaExceeded
from modelguard.serving._lines import Fairness
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch


def fair_queue(**limits: Any) -> BatchQueue:
    return queue_of(**{"max_queue": 64, "fair": True, **limits})


def fill(queue: BatchQueue, counts: dict[str, int], now: float = 0.0) -> None:
    """So many requests of each key, one key after the other; an item is its key and its number."""
    for key, count in counts.items():
        for number in range(count):
            queue.admit(request((key, number), key=key), now)


def served(queue: BatchQueue, batches: int, now: float = 1.0) -> list[Any]:
    return [item for _ in range(batches) for item in taken(queue, now)]


# Shares


def test_keys_take_turns_however_many_requests_one_of_them_has() -> None:
    """A polite caller that comes after a greedy one is in the next batch."""
    queue = fair_queue()
    fill(queue, {"greedy": 40, "polite": 2})
    assert Counter(greedy=2, polite=2) == Counter(key for key, _ in taken(queue, 1.0))
    assert Counter(greedy=4) == Counter(key for key, _ in taken(queue, 1.0))


def test_requests_of_one_key_go_in_the_order_of_arrival() -> None:
    """Fairness is between keys; within one nobody overtakes."""
    queue = fair_queue()
    fill(queue, {"a": 6, "b": 3})
    items = served(queue, 3)
    for key, count in {"a": 6, "b": 3}.items():
        assert list(range(count)) == [number for own, number in items if own == key]


def test_keys_get_their_shares() -> None:
    """A key with a share of three gets three times as much as one of the others, which have one."""
    queue = fair_queue(shares={"gold": 3}, max_size=8, max_queue=200)
    fill(queue, {"tin": 60, "gold": 60, "iron": 60})
    assert Counter(gold=24, tin=8, iron=8) == Counter(key for key, _ in served(queue, 5))


def test_an_item_costs_its_weight() -> None:
    """A key with items that are ten times as heavy gets a tenth as many of them."""
    queue = fair_queue(weighed=True, max_size=11, max_queue=200)
    for number in range(60):
        queue.admit(request(number, key="heavy", weight=10.0), 0.0)
        queue.admit(request(number, key="light", weight=1.0), 0.0)
    weights = Counter[float]()
    for _ in range(4):
        batch = queue.next_batch(1.0)
        assert isinstance(batch, Batch)
        weights.update(one.weight for one in batch.requests)
    assert weights[1.0] == pytest.approx(10 * weights[10.0], abs=12)


def test_items_without_weight_are_not_free() -> None:
    """Or a caller with empty texts would go before everybody else for ever."""
    queue = fair_queue(weighed=True, max_size=4)
    for number in range(20):
        queue.admit(request(number, key="empty", weight=0.0), 0.0)
        queue.admit(request(number, key="other", weight=1.0), 0.0)
    batch = queue.next_batch(1.0)
    assert isinstance(batch, Batch)
    assert 2 == sum(one.weight == 0 for one in batch.requests)


def test_nobody_pays_for_capacity_that_nobody_else_wanted() -> None:
    """A caller that was alone for long is level with one that comes then."""
    queue = fair_queue()
    fill(queue, {"early": 60})
    served(queue, 10)
    fill(queue, {"late": 20})
    assert 3 <= Counter(key for key, _ in served(queue, 2))["early"]


def test_a_caller_that_sends_one_at_a_time_gains_nothing_by_coming_again_at_once() -> None:
    """With one item a batch, it takes turns with a caller whose items wait."""
    queue = fair_queue(max_size=1)
    fill(queue, {"waits": 20, "again": 1})
    got = Counter[str]()
    for _ in range(20):
        ((key, _),) = taken(queue, 1.0)
        got[key] += 1
        if key == "again":
            queue.admit(request(("again", 0), key="again"), 1.0)
    assert 10 == pytest.approx(got["again"], abs=1)


def test_ever_new_keys_keep_nobody_from_its_turn() -> None:
    """Each new key goes before the next item of one that had its turn, and yet that one is served again and again."""
    queue = fair_queue(max_size=1, max_queue=16)
    fill(queue, {"old": 5})
    got = 0
    for number in range(5 * 3 * 4 * 16):
        for key in (f"new-{number}", f"newer-{number}"):
            if queue.waiting < 16:
                queue.admit(request((key, 0), key=key), 1.0)
        got += taken(queue, 1.0)[0][0] == "old"
    assert 5 == got


def test_shares_hold_across_keyword_arguments() -> None:
    """A key that spreads its requests over many groups gets no more turns than one with a single group."""
    queue = fair_queue(max_size=1, max_queue=64)
    for number in range(30):
        queue.admit(request("many", key="many", group=(("k", int, number % 6),)), 0.0)
    for _ in range(10):
        queue.admit(request("one", key="one", group=(("k", int, 99),)), 0.0)
    assert Counter(many=10, one=10) == Counter(served(queue, 20))


def test_no_batch_mixes_keyword_arguments_for_the_sake_of_fairness() -> None:
    """Groups still do not share a batch."""
    queue = fair_queue()
    for number in range(12):
        queue.admit(request(number, key=number % 3, group=(("k", int, number % 2),)), 0.0)
    while queue.waiting:
        batch = queue.next_batch(1.0)
        assert isinstance(batch, Batch)
        assert 1 == len({one.group for one in batch.requests})


def test_max_wait_still_counts_from_the_oldest() -> None:
    """Fairness chooses among what is due, and hurries nothing."""
    queue = fair_queue(max_wait=1.0)
    queue.admit(request("a", key="a"), 0.0)
    queue.admit(request("b", key="b", group=(("k", int, 1),)), 0.5)
    assert queue.next_batch(0.5) == pytest.approx(0.5)
    assert ["a"] == taken(queue, 1.0)
    assert queue.next_batch(1.0) == pytest.approx(0.5)
    assert ["b"] == taken(queue, 1.5)


@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    size=st.integers(1, 6),
    batches=st.integers(1, 30),
)
def test_keys_that_always_have_something_waiting_stay_within_a_bound(
    shares: list[float], size: int, batches: int
) -> None:
    """What two of them got, each over its share, differs by at most three items of each: two of them are a credit."""
    queue = fair_queue(max_size=size, max_queue=4096, shares=dict(enumerate(shares)))
    for number in range(200):
        for key in range(len(shares)):
            queue.admit(request((key, number), key=key), 0.0)
    got = Counter(key for key, _ in served(queue, batches))
    for one, mine in enumerate(shares):
        for other, theirs in enumerate(shares):
            assert abs(got[one] / mine - got[other] / theirs) <= 3 / mine + 3 / theirs + 1e-6


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=120),
    size=st.integers(1, 4),
)
def test_no_key_starves(arrivals: list[tuple[int, int]], size: int) -> None:
    """A key with something waiting is served before another one has been served five times since, whatever comes."""
    queue = fair_queue(max_size=size, max_queue=4096)
    since: dict[int, Counter[int]] = {}
    for key, count in arrivals:
        for _ in range(count):
            queue.admit(request(key, key=key), 0.0)
            since.setdefault(key, Counter())
        batch = queue.next_batch(0.0)
        if not isinstance(batch, Batch):
            continue
        keys = Counter(one.item for one in batch.requests)
        left = {one.key for one in queue._lines.live()}
        for waiting in list(since):
            if waiting in keys or waiting not in left:
                del since[waiting]
                if waiting in left:
                    since[waiting] = Counter()
            else:
                since[waiting].update(keys)
                assert all(times <= 4 for times in since[waiting].values()), since


# Priority


def test_urgent_requests_go_first() -> None:
    """Before those of the same key that came up to ``ageing`` earlier; those of equal priority in order of arrival."""
    queue = queue_of(max_queue=64, ageing=10.0)
    queue.order()
    for number in range(8):
        queue.admit(request(number), 0.0)
    for number in (8, 9):
        queue.admit(request(number, priority=1), 5.0)
    queue.admit(request(10, priority=2), 5.0)
    assert [10, 8, 9, 0] == taken(queue, 5.0)


def test_waiting_counts_as_much_as_priority() -> None:
    """After ``ageing`` seconds an item goes before newer ones of the next priority, so nothing waits for ever."""
    queue = queue_of(max_queue=64, max_size=1, ageing=10.0)
    queue.order()
    queue.admit(request("old"), 0.0)
    for number in range(20):
        queue.admit(request(number, priority=1), float(number))
    order = [taken(queue, 20.0)[0] for _ in range(21)]
    assert [*range(10), "old", 10] == order[:12] or [*range(11), "old"] == order[:12]


@given(coming=st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 5.0)), min_size=1, max_size=60))
def test_nothing_is_overtaken_by_what_comes_later_than_ageing_allows(coming: list[tuple[int, float]]) -> None:
    """An item of priority p goes before all that come more than (their priority - p) x ``ageing`` seconds after it."""
    queue = queue_of(max_queue=256, max_size=1, ageing=4.0)
    queue.order()
    now, known = 0.0, {}
    for number, (priority, pause) in enumerate(coming):
        now += pause
        queue.admit(request(number, priority=priority), now)
        known[number] = (now, priority)
    order = [taken(queue, now)[0] for _ in coming]
    for at, first in enumerate(order):
        for later in order[at + 1 :]:
            came, urgent = known[first][0] - known[later][0], known[first][1] - known[later][1]
            assert came <= urgent * 4.0 + 1e-9


def test_a_priority_does_nothing_against_other_keys() -> None:
    """It orders a key's own requests: calling everything urgent gives no larger share."""
    queue = fair_queue()
    for _ in range(20):
        queue.admit(request("loud", key="loud", priority=9), 0.0)
    for _ in range(20):
        queue.admit(request("calm", key="calm"), 0.0)
    assert Counter(loud=8, calm=8) == Counter(served(queue, 4))


# A full queue


def test_a_newcomer_below_its_share_takes_the_place_of_the_greediest() -> None:
    """The newest item of the key that has most waiting is refused, and says why."""
    queue = fair_queue(max_queue=8)
    fill(queue, {"greedy": 8})
    queue.admit(request("polite", key="polite"), 0.0)
    ((refused, failure),) = queue.undelivered
    assert ("greedy", 7) == refused.number  # type: ignore[attr-defined]
    assert isinstance(failure.error, QueueFull)
    assert failure.error.displaced
    assert "took the place" in str(failure.error)
    assert (8, 1) == (queue.waiting, queue.counters.refused_full)
    assert "polite" in taken(queue, 0.0)


def test_the_greediest_gets_no_place_from_others() -> None:
    """Its own newcomer is refused."""
    queue = fair_queue(max_queue=8)
    fill(queue, {"greedy": 6, "polite": 2})
    with pytest.raises(QueueFull) as refused:
        queue.admit(request("more", key="greedy"), 0.0)
    assert not refused.value.displaced
    assert not queue.undelivered


def test_places_do_not_go_back_and_forth() -> None:
    """Keys that have as much as each other displace nobody."""
    queue = fair_queue(max_queue=8)
    fill(queue, {"a": 8})
    for number in range(20):
        for key in ("a", "b"):
            with contextlib.suppress(QueueFull):
                queue.admit(request((key, number), key=key), 0.0)
    assert 4 == len(queue.undelivered)
    assert Counter(a=4, b=4) == Counter(one.key for one in queue._lines.live())


def test_a_caller_below_its_share_gets_a_place_among_many_keys() -> None:
    """Where each of the others has one item: what they have had counts."""
    queue = fair_queue(max_queue=8, max_size=2)
    for _ in range(4):
        for key in range(12):
            with contextlib.suppress(QueueFull):
                queue.admit(request(key, key=key), 0.0)
        taken(queue, 0.0)
    while queue.waiting < 8:
        queue.admit(request(0, key=0), 0.0)
    queue.admit(request("polite", key="polite"), 0.0)
    assert "polite" in {one.key for one in queue._lines.live()}


def test_an_urgent_request_takes_the_place_of_one_of_the_same_key() -> None:
    """Or background work that has filled the queue would keep it out."""
    queue = queue_of(max_queue=8)
    queue.order()
    for number in range(8):
        queue.admit(request(number), 0.0)
    queue.admit(request("urgent", priority=1), 1.0)
    assert [7] == [one.number for one, _ in queue.undelivered]  # type: ignore[attr-defined]
    assert "urgent" == taken(queue, 1.0)[0]
    for number in range(4):
        queue.admit(request(number), 1.0)
    with pytest.raises(QueueFull):
        queue.admit(request("as urgent as they are"), 1.0)


def test_whoever_would_be_late_displaces_nobody() -> None:
    """A newcomer that is refused for its deadline leaves the queue as it was."""
    queue = fair_queue(max_queue=8)
    measure(queue, 4, 2.0)
    fill(queue, {"greedy": 8})
    with pytest.raises(DeadlineUnreachable):
        queue.admit(request("hurried", key="polite", deadline=0.5), 0.0)
    assert (8, []) == (queue.waiting, queue.undelivered)


# What a request would have to wait


def test_the_estimate_follows_the_turns() -> None:
    """A polite caller is let in where a greedy one, whose turn comes later, is refused at once."""
    queue = fair_queue(max_queue=200)
    measure(queue, 4, 1.0)
    fill(queue, {"greedy": 100})
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    with pytest.raises(DeadlineUnreachable) as refused:
        queue.admit(request("more", key="greedy", deadline=5.0), 0.0)
    assert refused.value.estimate == pytest.approx(26.0, rel=0.1)
    queue.admit(request("polite", key="polite", deadline=5.0), 0.0)
    run(queue, batch, 1.0, 1.0)
    assert "polite" in served(queue, 2)


def test_requests_of_another_group_are_waited_for_once() -> None:
    """Eight requests with keyword arguments are two batches in front of one without any, and not four."""
    queue, group = fair_queue(max_queue=200), (("language", str, "de"),)
    measure(queue, 4, 1.0)
    for _ in range(3):
        for number in range(4):
            queue.admit(request(number, group=group), 0.0)
        batch = queue.next_batch(0.0)
        assert isinstance(batch, Batch)
        run(queue, batch, 1.0, 0.0)
    for number in range(8):
        queue.admit(request(number, key="a", group=group), 0.0)
    with pytest.raises(DeadlineUnreachable) as refused:
        queue.admit(request("alone", key="a", deadline=0.1), 0.0)
    assert refused.value.estimate == pytest.approx(2.25, rel=0.1)


def test_the_estimate_follows_priorities() -> None:
    """An urgent request is let in where others would be late."""
    queue = queue_of(max_queue=200)
    queue.order()
    measure(queue, 4, 1.0)
    for number in range(100):
        queue.admit(request(number), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    with pytest.raises(DeadlineUnreachable):
        queue.admit(request("calm", deadline=5.0), 0.0)
    queue.admit(request("urgent", deadline=5.0, priority=1), 0.0)
    run(queue, batch, 1.0, 1.0)
    assert "urgent" == taken(queue, 1.0)[0]


# Quotas


def test_a_key_over_its_quota_is_refused() -> None:
    """By name, with the time until its own requests have had their turns; other keys still have room."""
    queue = fair_queue(quota=3)
    measure(queue, 3, 1.0)
    fill(queue, {"a": 3})
    with pytest.raises(QuotaExceeded, match="3 requests with the key 'a' wait, and the quota of a key is 3") as refused:
        queue.admit(request("more", key="a"), 0.0)
    assert ("'a'", 3, 3) == (refused.value.key, refused.value.queued, refused.value.quota)
    assert refused.value.retry_after == pytest.approx(1.0)
    fill(queue, {"b": 3})
    assert (6, 1) == (queue.waiting, queue.counters.refused_quota)
    taken(queue, 0.0)
    fill(queue, {"a": 1})


def test_a_key_hears_when_its_requests_have_had_their_turns() -> None:
    """Other keys take turns with it, and what runs goes first, of which half is over on average."""
    queue = fair_queue(quota=4, max_size=4)
    measure(queue, 4, 1.0)
    fill(queue, {"a": 4, "b": 4})
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    fill(queue, {"a": sum(one.key == "a" for one in batch.requests)})
    assert (6, 4) == (queue.waiting, batch.count)
    with pytest.raises(QuotaExceeded) as refused:
        queue.admit(request("more", key="a"), 0.0)
    assert refused.value.retry_after == pytest.approx((6 + 2) / 4)


def test_calls_without_a_key_have_one_quota() -> None:
    """Leaving out the key is no way around it."""
    queue = queue_of(quota=2)
    queue.admit(request(), 0.0)
    queue.admit(request(), 0.0)
    with pytest.raises(QuotaExceeded, match="None"):
        queue.admit(request(), 0.0)


# Memory


def test_keys_are_forgotten() -> None:
    """A million keys that come and go leave nothing behind, though the queue is never empty."""
    queue = fair_queue(max_queue=64, max_size=2)
    fill(queue, {"stays": 2})
    fairness = queue._lines.fairness
    assert fairness is not None
    most = 0
    for number in range(5_000):
        queue.admit(request(number, key=number), 0.0)
        if number % 2:
            taken(queue, 0.0)
        most = max(most, len(fairness))
    assert most <= 64 + 1024
    while queue.waiting:
        taken(queue, 0.0)
    assert 0 == len(fairness)


def test_a_cancelled_request_leaves_no_key_behind() -> None:
    """Nor one that expired."""
    queue = fair_queue(max_queue=256)
    fill(queue, {"stays": 1})
    gone = [request(number, key=number, deadline=5.0) for number in range(200)]
    for one in gone:
        queue.admit(one, 0.0)
    for one in gone[:150]:
        queue.cancel(one)
    queue.expire(6.0)
    assert queue._lines.fairness is not None
    assert 1 == len(queue._lines.fairness)


class Changing:
    """A key that is changed after its call, so that it cannot be found any more."""

    def __init__(self) -> None:
        self.value = 0

    def __hash__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return self is other


def test_keys_that_change_are_forgotten_too() -> None:
    """A key that nobody finds any more is no leak, and its requests are computed."""
    queue = fair_queue(max_queue=64, max_size=2)
    fill(queue, {"stays": 2})
    fairness = queue._lines.fairness
    assert fairness is not None
    computed = 0
    for number in range(2_000):
        key = Changing()
        queue.admit(request("changed", key=key), 0.0)
        key.value = number + 1
        if number % 2:
            computed += taken(queue, 0.0).count("changed")
    assert len(fairness) <= 64 + 1024
    while queue.waiting:
        computed += taken(queue, 0.0).count("changed")
    assert (2_000, 0) == (computed, len(fairness))


class Incomparable:
    """A key that raises when it is compared, once it is broken."""

    broken = False

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        if self.broken:
            raise RuntimeError("not to be compared")
        return isinstance(other, Incomparable)


def test_a_key_that_cannot_be_compared_is_its_callers_error_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call is undone, and changes nothing for others: not their counts, nor whose turn it is."""
    queue = fair_queue(max_queue=5, max_size=5)
    for name in ("first", "second"):
        queue.admit(request(name, key=Incomparable()), 0.0)
    monkeypatch.setattr(Incomparable, "broken", True)
    refused = request("refused", key=Incomparable())
    with pytest.raises(RuntimeError, match="not to be compared"):
        queue.admit(refused, 0.0)
    queue.withdraw(refused)  # as the batcher does then
    fill(queue, {"a": 3})
    with pytest.raises(QueueFull):
        queue.admit(request("late", key="a"), 0.0)
    assert {"first", "second", ("a", 0), ("a", 1), ("a", 2)} == {*taken(queue, 0.0)}


@pytest.mark.parametrize("key", [float("nan"), 1.0, True, (), frozenset()])
def test_any_hashable_value_is_a_key(key: Any) -> None:
    """A key that is not equal to itself has its own quota and turn as well."""
    queue = fair_queue(max_queue=8, quota=6)
    for number in range(6):
        queue.admit(request((key, number), key=key), 0.0)
    with pytest.raises(QuotaExceeded):
        queue.admit(request((key, 6), key=key), 0.0)
    fill(queue, {"a": 1, "b": 1, "c": 1})
    assert [(key, 5)] == [one.number for one, _ in queue.undelivered]  # type: ignore[attr-defined]


def test_the_last_key_is_forgotten_with_its_request() -> None:
    """An empty queue knows nobody."""
    fairness = Fairness({}, 1.0)
    one = request(key="a")
    fairness.joined(one)
    assert (1, 1) == (len(fairness), fairness.waiting_of("a"))
    fairness.left(one)
    assert (0, 0) == (len(fairness), fairness.waiting_of("a"))


# Floods of a higher priority


@pytest.mark.parametrize("key", [None, "patient"], ids=["no key", "a key of its own"])
def test_a_key_of_its_own_answers_low_priorities_beside_a_flood_of_high_ones(key: str | None) -> None:
    """A full queue keeps the highest priorities; what has a key of its own gets its share, whatever others send."""
    queue = fair_queue(max_queue=16)
    patient: list[str] = []
    refused = 0
    for number in range(50):
        for one in [request("low", key=key), *(request("high", priority=5) for _ in range(8))]:
            try:
                queue.admit(one, number)
            except QueueFull:
                refused += 1
        patient += [item for item in taken(queue, number) if item == "low"]
    assert refused > 100
    assert (50 if key else 1) >= len(patient) >= (49 if key else 0)


# Interruptions


class Interrupting:
    """Raises KeyboardInterrupt at one line of this package: as Ctrl-C may, at any point."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        if "serving" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
@pytest.mark.parametrize("ordered", [False, True], ids=["first key", "later key"])
def test_an_admission_may_be_interrupted_at_any_point(full: bool, ordered: bool) -> None:  # noqa: FBT001 - pytest passes it
    """It is undone: every key has as many requests as wait, and all of them are computed."""
    before = sys.gettrace()
    for at in range(1, 400):
        queue = queue_of(max_queue=8, fair=ordered, quota=8 if ordered else None)
        for number in range(8 if full and ordered else 5):
            queue.admit(request(number, key="greedy" if ordered else None, priority=number % 2 * ordered), 0.0)
        new = request("new", key="polite", priority=1)
        interrupting = Interrupting(at)
        sys.settrace(interrupting)
        try:
            queue.order()
            queue.admit(new, 1.0)
        except KeyboardInterrupt:
            queue.withdraw(new)
        finally:
            sys.settrace(before)
        if interrupting.left > 0:
            return
        queue.order()
        fairness = queue._lines.fairness
        assert fairness is not None
        live = list(queue._lines.live())
        assert queue.waiting == len(live)
        assert Counter(one.key for one in live) == +Counter(
            {key: fairness.waiting_of(key) for key in (None, "greedy", "polite")}
        )
        assert "new" not in {one.item for one in live}
        assert len(live) == len(served(queue, 2 if len(live) > 4 else 1))
        assert (0, 0) == (queue.waiting, len(fairness))
    raise AssertionError("the admission has more lines than that")
