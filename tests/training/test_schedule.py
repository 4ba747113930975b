import pytest

from training.config import Schedule
from training.schedule import SHAPES, lr_at

CASE = {"peak": 1.0, "floor": 0.1, "warmup": 10, "total": 110}


def curve(**changes) -> list[float]:
    case = CASE | changes
    return [lr_at(step, **case) for step in range(case["total"])]


def test_every_schedule_has_its_shape():
    assert set(SHAPES) == set(Schedule)


@pytest.mark.parametrize("shape", Schedule)
def test_warms_up_from_above_zero_to_the_peak(shape):
    lr = curve(shape=shape)
    assert lr[0] == pytest.approx(0.1)
    assert lr[9] == max(lr) == 1.0
    assert lr[:10] == sorted(lr[:10])


@pytest.mark.parametrize("shape", [Schedule.cosine, Schedule.linear, Schedule.wsd])
def test_falls_to_the_floor_in_the_last_step(shape):
    lr = curve(shape=shape)
    assert lr[-1] == pytest.approx(0.1)
    assert lr[9:] == sorted(lr[9:], reverse=True)


def test_halfway():
    assert lr_at(59, **CASE) == pytest.approx(0.55)
    assert lr_at(59, **CASE, shape=Schedule.linear) == pytest.approx(0.55)
    assert lr_at(59, **CASE, shape=Schedule.wsd) == 1.0
    assert lr_at(99, **CASE, shape=Schedule.wsd) == pytest.approx(0.55)
    assert lr_at(109, **CASE, shape=Schedule.constant) == 1.0


def test_no_warmup_and_a_warmup_longer_than_the_run():
    assert curve(warmup=0)[0] == pytest.approx(1.0, abs=1e-3)
    assert curve(warmup=500) == pytest.approx([(s + 1) / 500 for s in range(110)])
    assert curve(warmup=110, total=110)[-1] == 1.0
    assert lr_at(0, peak=1.0, floor=0.1, warmup=0, total=1) == pytest.approx(0.1)
