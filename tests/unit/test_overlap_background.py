"""The threads that step and gather beside a backward pass, with collectives that end when the test says so."""

import threading
import time

import pytest

pytest.importorskip("torch")

from holmes.training.overlap.background import BackgroundSteps
from holmes.training.overlap.gatherer import Gatherer
from holmes.training.overlap.transfers import ALL_GATHER, REDUCE_SCATTER, Transfer

WAIT_S = 10.0


class FakeWork:
    """A collective that ends by `end`, with an error where one is given."""

    def __init__(self):
        self._ended = threading.Event()
        self._error = None

    def end(self, error=None):
        self._error = error
        self._ended.set()

    def is_completed(self):
        return self._ended.is_set()

    def wait(self):
        assert self._ended.wait(WAIT_S)
        if self._error is not None:
            raise self._error

    def _get_duration(self):
        return 1.0


class FakeStorage:
    def __init__(self):
        self.values, self.staging = object(), object()
        self.arrived = False

    def parameters(self):
        return []

    def place_stepped(self, target):
        return target

    def publish(self):
        self.arrived = True


class FakeLane:
    """Remembers the all-gathers it started, as (bucket, work)."""

    size = 2

    def __init__(self):
        self.started = []

    def all_gather(self, bucket, output, source):
        work = FakeWork()
        self.started.append((bucket, work))
        return Transfer(ALL_GATHER, bucket, 4, time.monotonic(), work)

    @property
    def buckets(self):
        return [bucket for bucket, _ in self.started]


def until(condition):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


def begin(order):
    """The threads of a step over as many buckets as `order` has; also the lane, its gatherer and what has stepped."""
    lane, stepped = FakeLane(), []
    gatherer = Gatherer([FakeStorage() for _ in order], order, lane)

    def step(bucket):
        stepped.append(bucket)
        gatherer.stepped(bucket)

    return BackgroundSteps(step, gatherer), gatherer, lane, stepped


def reduce_scatter(bucket):
    return Transfer(REDUCE_SCATTER, bucket, 4, time.monotonic(), FakeWork())


def test_gathers_go_one_at_a_time_and_only_while_nothing_is_reduced():
    background, _, lane, stepped = begin([0, 1, 2])
    first, second, third = (reduce_scatter(bucket) for bucket in range(3))
    background.hand_over(first)
    background.hand_over(second)
    first.work.end()
    until(lambda: stepped == [0])
    time.sleep(0.02)
    assert lane.buckets == []  # the second reduce-scatter is under way
    second.work.end()
    until(lambda: lane.buckets == [0])
    time.sleep(0.02)
    assert lane.buckets == [0]  # all-gather 0 is under way
    background.hand_over(third)
    lane.started[0][1].end()
    time.sleep(0.02)
    assert lane.buckets == [0]  # the third reduce-scatter is under way
    third.work.end()
    until(lambda: lane.buckets == [0, 1])
    background.hold_gathers()
    lane.started[1][1].end()
    background.finish()
    assert lane.buckets == [0, 1]
    assert stepped == [0, 1, 2]


def test_finish_waits_for_all_and_counts_the_wait_as_exposed():
    background, _, _, stepped = begin([1, 0])
    transfers = [reduce_scatter(bucket) for bucket in range(2)]
    for transfer in transfers:
        background.hand_over(transfer)
    works = [transfer.work for transfer in transfers]

    def end_both():
        until(lambda: background._is_over)  # finish has begun
        for work in works:
            time.sleep(0.1)
            work.end()

    threading.Thread(target=end_both).start()
    background.finish()
    assert stepped == [0, 1]
    assert sum(transfer.exposed_s for transfer in transfers) > 0.05


def test_what_fails_is_raised_where_the_model_computes():
    background, _, _, _ = begin([0, 1])
    transfer = reduce_scatter(0)
    background.hand_over(transfer)
    transfer.work.end(ConnectionError("rank 1 is lost"))
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        background.finish()
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        background.hand_over(reduce_scatter(1))


def test_stop_ends_the_threads_of_a_step_that_is_given_up():
    before = set(threading.enumerate())
    background, _, _, _ = begin([0])
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    background.stop()
    until(lambda: not any(thread.is_alive() for thread in started))


def test_gathers_that_no_rank_has_started_may_change_their_order():
    lane = FakeLane()
    gatherer = Gatherer([FakeStorage() for _ in range(4)], [3, 2, 1, 0], lane)
    for bucket in (3, 2, 1, 0):
        gatherer.stepped(bucket)
    gatherer.start_next()
    gatherer.reorder(2, [0, 1, 2, 3])  # another rank has started 2 already
    gatherer.start_ready()
    assert lane.buckets == [3, 2, 0, 1]
    gatherer.publish()
    gatherer.end_step()
    for _, work in lane.started:
        work.end()
    gatherer.wait_all()
    for bucket in range(4):
        gatherer.stepped(bucket)
    gatherer.start_ready()
    assert lane.buckets[4:] == [3, 2, 1, 0]
