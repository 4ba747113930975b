"""What processes agree on without a process group: a name for each attempt, and which of them holds up the others."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from training.distributed import ALONE, attempt
from training.watchdog import verdict


@pytest.mark.parametrize("begun", [False, True])
def test_an_attempt_has_a_name_of_its_own_whatever_an_earlier_one_left(begun):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    store.set("attempt", "stale")
    if begun:  # as far as a kill may have come while its ranks came together
        store.set("stale/1", "")
    names = {}
    threads = [
        threading.Thread(target=lambda rank=rank: names.update({rank: attempt(store, rank, 3, 10)})) for rank in (1, 2)
    ]
    for thread in threads:
        thread.start()
    names[0] = attempt(store, 0, 3, 10)
    for thread in threads:
        thread.join(10)
    assert len(set(names.values())) == 1
    assert len(names) == 3
    assert names[0] != "stale"
    assert not store.check(["attempt"])


def test_a_first_process_that_does_not_come_is_an_error():
    store = dist.HashStore()
    store.set("attempt", "stale")
    with pytest.raises(dist.DistStoreError, match="did not answer in 2 s"):
        attempt(store, 1, 2, 2)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({0: (True, "a"), 2: (True, "c")}, "rank 1 does not answer; the others wait for it"),
        ({0: (True, "a"), 1: (False, "data/loader.py:9 (gather)"), 2: (True, "c")}, "rank 1 is at data/loader.py:9"),
        ({0: (False, "a"), 1: (False, "b"), 2: (True, "c")}, "rank 0 is at a, rank 1 is at b; the others wait"),
        ({0: (True, "a"), 1: (True, "b"), 2: (True, "c")}, "all wait for each other"),
    ],
)
def test_who_holds_up_the_others(answers, said):
    assert verdict(answers, 3).startswith(said)


def test_one_process_alone_needs_no_other():
    assert ALONE.together(lambda: 3) == 3
    assert ALONE.gathered(lambda: 3) == [3]
    assert ALONE.in_turn(lambda: 3) == 3
    assert ALONE.highest(15) == 15
