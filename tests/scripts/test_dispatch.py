"""What an eager call costs before its kernel starts, and that it does not go through a registered operator."""

import time

import pytest
import torch

from kernels import glu, norm, rotary
from scripts import bench_dispatch
from scripts.kernel_cases import TORCH, Case

MOST = 20  # µs
PATIENCE = 30  # s; other processes, and a slow phase of the machine, only ever add


@pytest.mark.parametrize("name", TORCH)
def test_dispatch_is_cheap(name):
    best, until = float("inf"), time.monotonic() + PATIENCE
    while best > MOST and time.monotonic() < until:
        row = bench_dispatch.measure(name, "cpu", rounds=20)
        best = min(best, row["normgpt_us"])
    assert best <= MOST
    assert best < row["operator_us"], "the registered operator alone costs less"


@pytest.mark.parametrize("name", TORCH)
def test_eager_calls_go_round_the_operator(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("a registered operator was called")

    for module, operators in (
        (norm, ("_forward_op", "_backward_op")),
        (glu, ("_forward_op", "_backward_op")),
        (rotary, ("_turn_op",)),
    ):
        for operator in operators:
            monkeypatch.setattr(module, operator, refuse)
    case = Case(name, 4, 64, "fp32")
    outputs = case.call(case.fused, case.inputs("cpu"))
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])


def test_stubs_are_taken_away_again():
    before = norm._forward_kernel
    with bench_dispatch.stubbed():
        assert norm._forward_kernel is not before
    x = torch.ones(2, 4)
    assert norm._forward_kernel is before
    assert torch.equal(norm.layer_norm(x), torch.zeros(2, 4))


def test_table():
    lines = bench_dispatch.render([bench_dispatch.measure("swiglu", "cpu", rounds=1)]).splitlines()
    assert lines[0].startswith("kernel")
    assert lines[2].startswith("swiglu")
