"""``_times``: how long a batch takes, learned from every run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from modelguard.serving._times import BatchTimes, Curve
from modelguard.serving.status import Quantiles


def learned(runs: Iterable[tuple[int, float]], *, now: float = 0.0) -> BatchTimes:
    """Runs of so many items took so many seconds; as in a queue, each batch ends before somebody asks."""
    times = BatchTimes()
    for count, seconds in runs:
        times.record(count, 0.0, None, seconds, now)
        times.record_batch(count, seconds, now)
        times.curve()
    return times


def curve(times: BatchTimes, group: object = None) -> Curve:
    found = times.curve(group)
    assert found is not None
    return found


def test_before_the_first_run_nothing_is_known() -> None:
    """There is no estimate, and nothing to refuse anybody for."""
    times = BatchTimes()
    assert times.curve() is None
    assert not times.fresh(0.0)
    assert times.rate(0.0) is None


def test_a_fixed_time_and_one_for_each_item_are_told_apart() -> None:
    """Two sizes are enough."""
    found = curve(learned([(1, 0.11), (4, 0.14), (1, 0.11), (4, 0.14)]))
    assert 0.42 == pytest.approx(found.seconds(32, 0.0), rel=0.02)


def test_one_size_says_little_about_others() -> None:
    """Larger batches may take no longer, and smaller ones may take as much less as they have fewer items."""
    found = curve(learned([(4, 1.0)] * 5))
    assert (0.25, 1.0, 1.0) == tuple(pytest.approx(found.seconds(count, 0.0)) for count in (1, 4, 32))


def test_first_runs_that_were_no_measure_are_forgotten() -> None:
    """Four calls that end early say nothing about larger batches: these take no longer here, as one run has shown."""
    early, late = [(1, 3e-5)] * 4, [(1, 0.029), (5, 0.029), (8, 0.029), (1, 0.03), (1, 0.03), (1, 0.03)]
    assert curve(learned(early + late)).seconds(8, 0.0) < 0.05


def test_the_slope_survives_a_long_time_of_equal_batches() -> None:
    """Under steady load all batches have one size; what was learned about others before still counts."""
    times = learned([(1, 0.11), (8, 0.18)])
    for _ in range(500):
        times.record(32, 0.0, None, 0.42, 0.0)
        curve(times)
    assert 0.11 == pytest.approx(curve(times).seconds(1, 0.0), rel=0.1)


def test_chance_does_not_turn_the_line() -> None:
    """Times vary by a fifth, sizes by one item: one item still takes about as long as the fixed time."""
    dice = random.Random(1)
    runs = [(count, (0.03 + 0.0005 * count) * dice.uniform(0.8, 1.2)) for count in (1, 32, 1, 16, 8, 32) * 3]
    runs += [(count, (0.03 + 0.0005 * count) * dice.uniform(0.8, 1.2)) for count in (31, 32) * 200]
    assert 0.03 == pytest.approx(curve(learned(runs)).seconds(1, 0.0), rel=0.5)


def test_a_slow_first_run_is_forgotten_after_three_more() -> None:
    """A model that sets itself up in its first run is not taken for a slow one, even if all batches are one item."""
    times = learned([(1, 10.0), (1, 0.03), (1, 0.03), (1, 0.03)])
    assert curve(times).seconds(1, 0.0) < 0.05


@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_as_many_items_fit_as_end_in_time(mean: float) -> None:
    """The largest batch that ends in time in any case; nothing beyond twice the largest one is believed."""
    for found in (
        Curve(0.03, 0.0005, 0.0001, math.inf, 16),
        Curve(0.03, 0.0005, 0.0001, math.inf, 200),
        Curve(0.0, 0.001, 0.0, 0.02, 20),
        Curve(0.01, 0.0, 0.0, math.inf, 4),
    ):
        for left in (0.005, 0.03, 0.04, 0.05, 0.2, 1.0):
            count = found.count_within(left, mean, 5000)
            assert not count or found.holds(count, count * mean, left)
            assert count == 5000 or not found.holds(count + 1, (count + 1) * mean, left)


def test_an_estimate_is_on_the_safe_side() -> None:
    """Nine of ten batches take no longer: with the median, half of what is admitted would be late."""
    dice = random.Random(2)
    runs = [(count, (0.03 + 0.001 * count) * dice.gauss(1.0, 0.1)) for count in (1, 8, 32) * 40]
    found = curve(learned(runs))
    late = sum(dice.gauss(1.0, 0.1) * (0.03 + 0.001 * 16) > found.seconds(16, 0.0) for _ in range(1000))
    assert 20 < late < 250


def test_weight_counts_where_it_explains_the_time() -> None:
    """With the same number of items, a batch of twice the weight takes longer."""
    times = BatchTimes()
    for weight in (100.0, 400.0, 200.0, 1000.0) * 5:
        times.record(4, weight, None, 0.01 + weight / 1000, 0.0)
    assert 0.51 == pytest.approx(curve(times).seconds(4, 500.0), rel=0.02)


def test_a_weight_that_does_not_matter_is_found_out() -> None:
    """The time follows the number of items, whatever they weigh."""
    dice = random.Random(3)
    times = BatchTimes()
    for count in (1, 8, 4, 16, 2) * 8:
        times.record(count, count * dice.uniform(1.0, 100.0), None, 0.01 * count, 0.0)
    found = curve(times)
    assert found.seconds(8, 8.0) == pytest.approx(found.seconds(8, 800.0), rel=0.2)


def test_groups_have_times_of_their_own() -> None:
    """A keyword argument that makes the model ten times slower does so for its own batches only."""
    times = BatchTimes()
    slow = (("model", str, "large"),)
    for count in (1, 4, 8) * 6:
        times.record(count, 0.0, None, 0.01 * count, 0.0)
        times.record(count, 0.0, slow, 0.1 * count, 0.0)
    assert 0.04 == pytest.approx(curve(times).seconds(4, 0.0), rel=0.1)
    assert 0.4 == pytest.approx(curve(times, slow).seconds(4, 0.0), rel=0.1)


def test_ever_new_groups_take_bounded_memory() -> None:
    """A client that makes keyword arguments up does not fill the memory."""
    times = BatchTimes()
    for number in range(2_000):
        group = (("k", int, number),)
        times.record(1 + number % 3, 0.0, group, 0.01, 0.0)
        curve(times, group)
    assert len(times._factors) <= 256
    assert len(times._curves) <= 256


@pytest.mark.parametrize("by", [10.0, 3.0, 1 / 3, 0.1])
def test_a_model_that_changes_its_speed_is_followed_after_three_runs(by: float) -> None:
    """Whatever size these have, all others are rescaled as well."""
    times = learned([(1, 0.11), (32, 0.42)] * 10)
    for _ in range(3):
        times.record(32, 0.0, None, 0.42 * by, 0.0)
    found = curve(times)
    assert 0.42 * by == pytest.approx(found.seconds(32, 0.0), rel=0.15)
    assert 0.11 * by == pytest.approx(found.seconds(1, 0.0), rel=0.15)


def test_a_trivial_first_call_does_not_turn_the_line() -> None:
    """One call that computes nothing, before those that do, is no measure of how much larger batches cost."""
    found = curve(learned([(1, 0.0001), (1, 0.3), (1, 0.3), (4, 0.3), (4, 0.3)]))
    assert 0.3 == pytest.approx(found.seconds(4, 0.0), rel=0.1)
    assert 0.1 < found.seconds(1, 0.0) <= 0.33
    assert found.seconds(30, 0.0) < 2.4


@pytest.mark.parametrize("seconds", [20.0, 1e-6], ids=["stall", "nothing"])
@pytest.mark.parametrize("count", [1, 8, 32, 64])
def test_no_single_run_moves_a_price_far(count: int, seconds: float) -> None:
    """At most twice in either direction, and three times if it is the first of a larger size."""
    times = learned([(1, 0.0305), (8, 0.034), (32, 0.046)] * 6)
    before = {size: curve(times).seconds(size, 0.0) for size in (1, 8, 32, 64)}
    times.record(count, 0.0, None, seconds, 0.0)
    after = {size: curve(times).seconds(size, 0.0) for size in before}
    most = 3 if count == 64 else 2
    assert all(1 / most <= after[size] / before[size] <= most for size in before), after


def test_a_stall_does_not_count() -> None:
    """One batch that takes fifty times as long says nothing about the next one."""
    times = learned([(1, 0.11), (32, 0.42)] * 10)
    before = curve(times).seconds(32, 0.0)
    times.record(32, 0.0, None, 20.0, 0.0)
    assert curve(times).seconds(32, 0.0) < 1.1 * before


@pytest.mark.parametrize(
    "takes",
    [lambda n: 0.0, lambda n: 1e-9 * n, lambda n: 0.001 * n * n, lambda n: 0.5 / n],
    ids=["nothing", "nearly nothing", "squares", "less for more"],
)
def test_odd_models_get_sound_estimates(takes: Callable[[int], float]) -> None:
    """Models without any cost, with a steep one, or faster in larger batches: never negative, never infinite."""
    found = curve(learned([(count, takes(count)) for count in (1, 2, 4, 8, 16) * 5]))
    assert all(0 <= found.seconds(count, 0.0) < 10 for count in (1, 2, 16, 32))


def test_measurements_last_ten_seconds() -> None:
    """After that nothing is refused because of them; for slow models, as long as ten runs take."""
    times = learned([(1, 0.1)] * 3)
    assert times.fresh(10.0)
    assert not times.fresh(10.1)
    times.record(1, 0.0, None, 15.0, 20.0)
    assert times.fresh(170.0)


def test_two_runs_are_not_enough_to_refuse_anything() -> None:
    """Three are."""
    assert not learned([(1, 1.0)] * 2).fresh(0.0)
    assert learned([(1, 1.0)] * 3).fresh(0.0)


def test_a_size_far_beyond_all_others_is_tried_in_steps() -> None:
    """The first steps of a slope say little about its far end, so a batch is at most twice as large as the last one."""
    found = curve(learned([(1, 0.1), (2, 0.1)] * 3))
    assert found.holds(4, 0.0, 0.15)
    assert not found.holds(5, 0.0, 0.15)
    assert found.holds(32, 0.0, 2.0), "where even the worst case holds, there is nothing to be careful about"


def test_the_rate_is_items_over_the_time_that_they_took() -> None:
    """Runs that failed included; it is None if nothing was computed recently."""
    times = BatchTimes()
    times.record_batch(4, 1.0, 0.0)
    times.record_batch(4, 3.0, 0.0)
    assert 2.0 == times.rate(0.0)
    assert times.rate(31.0) is None


def test_quantiles_are_values_that_occurred() -> None:
    """No interpolation; zero before the first."""
    found = Quantiles.of(float(n) for n in range(100))
    assert (50.0, 90.0, 99.0, 99.0) == (found.p50, found.p90, found.p99, found.max)
    assert 0.0 == Quantiles.of([]).p99


def test_arguments_that_cannot_be_compared_are_left_out() -> None:
    """Their runs teach nothing, and those of others are learned from all the same."""

    class Incomparable:
        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not to be compared")

    times = learned([(4, 0.4)] * 5)
    for _ in range(3):
        times.record(4, 0.0, ((("mode", Incomparable, Incomparable())),), 0.4, 0.0)
    for _ in range(20):
        times.record(4, 0.0, None, 0.4, 0.0)
    assert 0.3 < curve(times).seconds(4, 0.0) < 0.6


def test_what_bad_items_cost_is_the_runs_that_they_add_over_their_number() -> None:
    """One that was hard to find among many does not stand for all: several in a batch share their runs."""
    times = learned([(8, 0.1)] * 10)
    for bad, runs in ((1, 7), (4, 8), (4, 8), (4, 8)):
        times.record(8, 0.0, None, 0.1, 0.0)
        times.record_batch(8, 0.1 * (1 + runs), 0.0, bad=bad / 8)
    found = curve(times)
    assert 2.0 < found.again / times.bad < 3.0  # 31 runs for 13 items


SLOW = [(1, 0.09), (4, 0.09), (1, 0.09), (10, 0.57)]


def test_one_slow_run_of_a_larger_size_is_not_all_that_counts() -> None:
    """Ten items may take as much longer than four as they are more, and half as long again: no single run says more."""
    assert curve(learned(SLOW)).seconds(10, 0.0) < 0.09 * 10 / 4 * 1.55


def test_what_one_run_has_shown_of_a_size_is_doubted_in_the_end() -> None:
    """Else a size that was slow once would never be tried again, where no request has so much time."""
    assert curve(learned([*SLOW, *[(4, 0.09)] * 200])).seconds(10, 0.0) < 0.09 * 10 / 4 * 1.1


def test_what_several_runs_have_shown_of_a_size_stays() -> None:
    """Beyond 32 items batches take longer, as when a cache overflows: no number of smaller ones speaks against it."""
    jump = [(1, 0.01), (16, 0.02), (32, 0.03), (40, 0.15), (48, 0.15), (40, 0.15), (60, 0.15), (40, 0.15)] * 4
    assert curve(learned([*jump, *[(16, 0.02)] * 1000])).seconds(48, 0.0) > 0.12


@pytest.mark.parametrize(("spread", "most"), [(0.1, 1.1), (0.3, 2.0), (0.6, 10.0)])
def test_sizes_that_do_not_run_stay_as_slow_as_they_were_where_times_vary(spread: float, most: float) -> None:
    """Of times that vary the logarithm is less than that of their mean: that does not make the model faster."""
    dice = random.Random(7)

    def runs(counts: list[int]) -> list[tuple[int, float]]:
        return [(count, (0.1 + 0.01 * count) * dice.lognormvariate(-spread * spread / 2, spread)) for count in counts]

    found = curve(learned(runs([1, 32] * 20 + [32] * 1500)))
    assert 0.11 / most < found.seconds(1, 0.0) / found.margin < 0.11 * most
