"""Threads that divide a block among them."""

import gc
import os
import threading
import time

import pytest

from prefed.core.hands import ALONE, Hands


def test_each_job_is_done_once_and_the_first_here() -> None:
    hands, done = Hands(2), list[tuple[int, threading.Thread]]()
    for _ in range(3):
        done.clear()
        jobs = [lambda n=n: done.append((n, threading.current_thread())) for n in range(3)]
        hands.work(jobs)
        assert sorted(n for n, _ in done) == [0, 1, 2]
        assert dict(done)[0] is threading.current_thread()
        assert threading.current_thread() not in (dict(done)[1], dict(done)[2])


def test_one_hand_needs_no_thread() -> None:
    before, done = threading.active_count(), []
    ALONE.work([lambda: done.append(1)])
    assert done == [1]
    assert threading.active_count() == before


@pytest.mark.parametrize("bad", [0, 1])
def test_what_goes_wrong_is_raised_when_all_are_done(bad: int) -> None:
    done = []

    def job(n: int) -> None:
        if n == bad:
            raise IndexError("a label is none of the model's classes")
        time.sleep(0.05)
        done.append(n)

    with pytest.raises(IndexError, match="a label"):
        Hands(1).work([lambda: job(0), lambda: job(1)])
    assert done == [1 - bad]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be sent away")
def test_helpers_may_be_anywhere_but_here() -> None:
    """And this thread where it could be before."""
    cores, found = os.sched_getaffinity(0), []
    hands = Hands(1)
    for _ in range(2):  # the first time there is nobody to send
        hands.work([lambda: None, lambda: found.append(os.sched_getaffinity(0))])
    assert os.sched_getaffinity(0) == cores
    assert found[1] <= cores
    if len(cores) > 1:
        assert len(found[1]) == len(cores) - 1


def test_helpers_end_with_whom_they_helped() -> None:
    hands, helpers = Hands(2), set[threading.Thread]()
    hands.work([lambda: None, *[lambda: helpers.add(threading.current_thread())] * 2])
    assert all(helper.is_alive() for helper in helpers)
    del hands
    gc.collect()
    for helper in helpers:
        helper.join(10)
        assert not helper.is_alive()
