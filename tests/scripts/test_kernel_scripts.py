"""The scripts that check and time the kernels on a GPU, walked through on a CPU: every step but the GPU's own."""

import json
import math
import subprocess
import time

import pytest
import torch

from errors import UserError
from kernels import reference
from scripts import bench_dispatch, bench_kernels, check_kernels, compile_ahead, gpu, kernel_cases, results
from scripts.kernel_cases import TORCH, Case
from scripts.results import read, table

SIZES = [(4, 64), (2, 96)]


@pytest.mark.parametrize("name", TORCH)
def test_pytorchs_version_computes_the_same(name):
    """What the kernels are timed against must do the kernels' work."""
    case = Case(name, 6, 128, "fp32", bias=name.endswith("layer_norm"))
    inputs = case.inputs("cpu")
    ours, theirs = (case.call(function, inputs) for function in (case.fused, TORCH[name]))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_bytes_count_each_tensor_once():
    assert Case("rms_norm", 10, 32, "bf16").n_bytes("forward") == 2 * 10 * 32 * 2
    assert Case("add_layer_norm", 10, 32, "fp32").n_bytes("backward") == 4 * 10 * 32 * 4
    assert Case("swiglu", 10, 32, "fp32").n_bytes("backward") == 5 * 10 * 32 * 4
    rope = Case("rope", 8, 512, "bf16")  # 8 positions, 4 heads of q and one of k, 128 wide; two tables of 64 columns
    assert rope.n_bytes("forward") == 2 * (8 * 5 * 128 * 2) + 2 * (8 * 64 * 4)
    assert sum(t.numel() for t in rope.inputs("cpu").values()) == 8 * 5 * 128 + 2 * 8 * 64


@pytest.fixture
def quick(monkeypatch):
    """Every call is made once and is said to take 2 ms, so that rates can be told beforehand."""

    def two_milliseconds(fn, device):
        fn()
        return 2.0, 1.5, 3.0

    bench_kernels.copy_gb_per_s.cache_clear()
    monkeypatch.setattr(bench_kernels, "device_milliseconds", two_milliseconds)
    monkeypatch.setattr(bench_dispatch, "CALLS", 1)
    yield
    bench_kernels.copy_gb_per_s.cache_clear()


def last(iterator):
    *_, rows = iterator
    return rows


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, while it compiles
def test_benchmark(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(bench_kernels, "VOLUME", 2**16)
    sizes = [(32, 2048), (2, 96)]
    rows = last(bench_kernels.run(["rms_norm", "swiglu"], sizes, "fp32", "cpu", seconds=600))
    assert len(rows) == 2 * len(sizes) * 2 * len(bench_kernels.IMPLEMENTATIONS)
    for row in rows:
        if row["implementation"] == "liger":
            assert row["ms"] is None
            continue
        moved = Case(row["kernel"], row["n_rows"], row["n_cols"], "fp32").n_bytes(row["direction"])
        assert (row["ms"], row["ms_p10"], row["ms_p90"]) == (2.0, 1.5, 3.0)
        assert row["gb_per_s"] == round(moved / 2e6, 1)
        assert row["fraction_of_copy"] == pytest.approx(1, abs=0.02)
        assert (row["host_us"] is None) == (row["implementation"] == "compiled")
    results.write(tmp_path / "bench.json", rows)
    assert read(tmp_path / "bench.json") == rows
    assert json.loads((tmp_path / "bench.json").read_text())["environment"]["versions"]["torch"]
    lines = bench_kernels.render(rows).splitlines()
    assert len(lines) == 2 + 2 * 2 * len(sizes)
    assert "normgpt / copy" in lines[0]
    if bench_kernels.draw(rows, tmp_path / "bench.png"):
        assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_benchmark_leaves_out_what_there_is_no_time_for(quick):
    rows = last(bench_kernels.run(["rms_norm"], SIZES[:1], "fp32", "cpu", seconds=-1))
    assert all(row["ms"] is None and row["gb_per_s"] is None for row in rows)
    assert " - " in bench_kernels.render(rows)


def test_benchmark_goes_on_without_an_opponent_that_fails(quick, monkeypatch, capsys):
    def liger(name):
        def out_of_memory(**inputs):
            raise torch.OutOfMemoryError("too much")

        return out_of_memory

    monkeypatch.setattr(bench_kernels, "liger", liger)
    monkeypatch.setattr(bench_kernels, "IMPLEMENTATIONS", ("normgpt", "liger"))
    rows = last(bench_kernels.run(["rms_norm"], SIZES[:1], "fp32", "cpu", seconds=600))
    assert [row["ms"] for row in rows] == [2.0, 2.0, None, None]
    assert "liger, rms_norm, 4 x 64: OutOfMemoryError" in capsys.readouterr().out


def test_device_times_are_medians():
    waits = iter([0.0, 0.0, 0.05, 0.01])  # the first compiles
    middle, low, high = bench_kernels.device_milliseconds(lambda: time.sleep(next(waits)), "cpu")
    assert low < 5 < middle < 45 < high


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_check_holds_and_says_so(tmp_path, capsys):
    check_kernels.main(check_kernels.Options(to=str(tmp_path / "check.json")))
    assert "0 fail" in capsys.readouterr().out
    assert {row["kernel"].removesuffix(" with bias") for row in read(tmp_path / "check.json")} == set(TORCH)


def test_check_sees_a_wrong_kernel(monkeypatch, capsys):
    case = Case("rms_norm", 5, 64, "fp32")
    wrong = property(lambda case: lambda x, weight: 1.001 * reference.rms_norm(x, weight))
    monkeypatch.setattr(Case, "fused", wrong)
    monkeypatch.setattr(
        check_kernels, "everything", lambda device: check_kernels.against_twin(case, case.inputs(device))
    )
    with pytest.raises(SystemExit) as end:
        check_kernels.main(check_kernels.Options())
    assert end.value.code == 1
    assert "output 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", TORCH)
def test_check_of_the_ends_of_large_tensors(name):
    """With sizes that fit here: gradients that are zero but at the ends leave the ends' twin as the truth."""
    rows = list(check_kernels.check_large(Case(name, 40, 64, "fp32", bias=name.endswith("layer_norm")), "cpu"))
    assert rows
    assert all(row["ok"] and row["allowed"] > 0 for row in rows)


@pytest.mark.parametrize("size", check_kernels.LARGE)
def test_large_is_beyond_int32(size):
    B, T, H, _, D = kernel_cases.shape(*size)
    assert math.prod(size) > 2**31
    assert B * T * H * D > 2**31
    assert Case("rope", *size).n_bytes("forward") > 2**33


@pytest.mark.parametrize(("wrong", "failed"), [(0, 0), (3, 0), (0, 1), (0, "late")])
def test_all_of_a_gpu_in_order(wrong, failed, monkeypatch, capsys):
    """A wrong kernel is timed too, but nobody can overlook that it is wrong."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(check_kernels, "run", lambda to: done.append(to) or wrong)
    for module in (bench_dispatch, bench_kernels):
        monkeypatch.setattr(module, "main", lambda options: done.append(options.to))

    def call(command, timeout):
        assert timeout <= gpu.SECONDS
        done.append(command[3].removeprefix("to="))
        if failed == "late":
            raise subprocess.TimeoutExpired(command, timeout)
        return failed

    monkeypatch.setattr(gpu.subprocess, "call", call)
    with pytest.raises(SystemExit) as end:
        gpu.main(gpu.Options())
    assert end.value.code == int(bool(wrong or failed))
    out = capsys.readouterr().out
    assert ("3 comparisons" in out) == bool(wrong)
    assert ("-m scripts.bench_train" in out) == (failed == "late")
    files = ("check", "dispatch", "kernels", "train")
    assert done == [f"results/gpu/nvidia-h100-80gb-hbm3/{file}.json" for file in files]


@pytest.mark.parametrize("main", [check_kernels.main, bench_dispatch.main])
def test_no_place_to_run(main, monkeypatch):
    monkeypatch.setattr(kernel_cases, "INTERPRETED", False)
    with pytest.raises(UserError, match="set it and run again"):
        main(check_kernels.Options())


def test_table_aligns():
    assert table([["a", "number"], ["long", "1"], ["b", "23"]]).splitlines() == [
        "a     number", "----  ------", "long       1", "b         23",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (bench_kernels.main, bench_kernels.Options(dtype="fp8"), "dtype=fp8 must be one of bf16, fp16, fp32"),
        (compile_ahead.main, compile_ahead.Options(target="sm_9"), "target=sm_9 is not known; near names: sm_90"),
        (compile_ahead.main, compile_ahead.Options(), "nothing is compiled under TRITON_INTERPRET=1"),
        (compile_ahead.main, compile_ahead.Options(n_cols=0), "n_cols=0 must be at least 1"),
        (gpu.main, gpu.Options(), "there is no GPU here"),
    ],
)
def test_mistakes(main, options, message):
    with pytest.raises(UserError, match=message):
        main(options)
