"""The loop: the same command gives the same bits, resumed or not, alone or beside a twin, and nothing is lost."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import train as program
import training.run
from configs.schema import Config
from errors import UserError
from model.gpt import GPT
from tests.conftest import ROOT
from training import checkpoint
from training.folder import claimed
from training.run import Diverged, Run
from training.schedule import lr_at
from training.timing import WARMUP_STEPS

TIMES = ("time/", "compare/step_time_ratio")


def metrics(folder: Path) -> list[dict]:
    """Everything recorded but times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in records]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    saved = checkpoint.step_folder(folder / "checkpoints", step)
    return load_file(saved / "model.safetensors") | load_file(saved / "optim.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def run(cfg: Config, *twin: Config) -> Path:
    program.train([cfg, *twin])
    return Path(cfg.runs_dir) / cfg.name


def twin_of(cfg: Config, other: Config) -> Config:
    return replace(other, name=f"{cfg.name}-twin")


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_the_same_command_gives_the_same_metrics(small, mode):
    torch.set_num_threads(2)  # where sums could be split in another order
    overrides = [f"compile={mode}", "train.steps=6", "model.dropout=0.1", "train.accumulate=2"]
    a, b = (run(small(*overrides, f"name={name}")) for name in "ab")
    assert metrics(a) == metrics(b)
    assert same(weights(a, 6), weights(b, 6))


def test_compiled_losses_are_those_of_eager(small):
    a, b = (run(small(f"compile={mode}", "train.steps=3", f"name={mode}")) for mode in ("eager", "full"))
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x == pytest.approx(y, rel=1e-4)
    assert weights(a, 3).keys() == weights(b, 3).keys()


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_20_steps_equal_10_and_10_resumed(small, mode):
    overrides = [f"compile={mode}", "model.dropout=0.1", "train.accumulate=2"]
    straight = run(small(*overrides, "name=straight"))
    run(small(*overrides, "name=resumed", "train.stop_at=10"))
    resumed = run(small(*overrides, "name=resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)
    assert same(weights(straight, 20), weights(resumed, 20))
    assert (json.loads((resumed / "summary.json").read_text()))["status"] == "finished"


def test_a_stop_between_evaluations_leaves_no_trace(small):
    straight = run(small("name=straight"))
    run(small("name=resumed", "train.stop_at=7"))
    resumed = run(small("name=resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)


def test_twins_share_batches_and_initial_weights_and_equal_their_lone_runs(small):
    cfg, other = small("norm=rmsnorm", "name=a"), small("norm=layernorm", "name=b")
    together = run(cfg, twin_of(cfg, other))
    beside = together.with_name("a-twin")
    alone = run(small("norm=rmsnorm", "name=alone"))
    ours = [{k: v for k, v in r.items() if not k.startswith("compare/")} for r in metrics(together)]
    assert [r for r in ours if len(r) > 2] == metrics(alone)
    assert same(weights(together, 20), weights(alone, 20))
    assert metrics(beside) == metrics(run(small("norm=layernorm", "name=b")))
    hashes = [json.loads((f / "environment.json").read_text())["batch_hashes"] for f in (together, beside, alone)]
    assert hashes[0].keys() == {"0", "1", "100"}
    assert hashes[0] == hashes[1] == hashes[2]


def test_twins_resume_together(small):
    def pair(name, *overrides):
        cfg = small("norm=rmsnorm", f"name={name}", *overrides)
        return cfg, twin_of(cfg, small("norm=layernorm", *overrides))

    straight = run(*pair("straight"))
    run(*pair("resumed", "train.stop_at=10"))
    resumed = run(*pair("resumed", "resume=true"))
    assert metrics(straight) == metrics(resumed)
    assert any("compare/gap" in r for r in metrics(straight))


def test_twins_go_on_from_the_last_step_that_both_have(small):
    def pair(name, *overrides):
        cfg, other = (
            small(f"norm={n}", f"name={name}", "checkpoint.every=5", *overrides) for n in ("rmsnorm", "layernorm")
        )
        return cfg, twin_of(cfg, other)

    straight = run(*pair("straight"))
    folder = run(*pair("resumed", "train.stop_at=10"))
    twin = folder.with_name("resumed-twin") / "checkpoints"
    shutil.rmtree(checkpoint.step_folder(twin, 10))  # killed between the saves of the two
    run(*pair("resumed", "resume=true"))
    assert metrics(folder) == metrics(straight)
    assert same(weights(folder, 20), weights(straight, 20))
    shutil.rmtree(twin)
    (folder / "summary.json").unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="no whole checkpoint of one step"):
        program.train([*pair("resumed", "resume=true")])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_ahead_of_its_metrics_is_passed_over(small, capsys):
    straight = run(small("name=straight", "checkpoint.every=5"))
    folder = run(small("checkpoint.every=5", "train.stop_at=15"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-4]))  # never reached the disk
    run(small("checkpoint.every=5", "resume=true"))
    assert "lacks steps" in capsys.readouterr().err
    assert metrics(folder) == metrics(straight)


def test_each_process_that_worked_on_a_run_is_on_record(small, capsys):
    folder = run(small("train.stop_at=10"))
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"threads": 99}))
    run(small("resume=true"))
    assert "goes on with another threads" in capsys.readouterr().err
    assert [b["threads"] for b in json.loads((folder / "environment.json").read_text())["before"]] == [99]


def test_a_folder_in_use_is_refused(small):
    cfg = small("resume=true")
    with claimed([Path(cfg.runs_dir) / "run"]), pytest.raises(UserError, match="in use by another process"):
        program.train([cfg])
    run(cfg)


def test_neither_twin_always_goes_first(small, monkeypatch):
    order, whole = [], Run.step

    def noted(self, *args):
        order.append(self.cfg.name)
        return whole(self, *args)

    monkeypatch.setattr(Run, "step", noted)
    cfg = small("norm=rmsnorm", "name=a", "train.steps=4")
    run(cfg, replace(small("train.steps=4"), name="b"))
    assert "".join(order) == "abbaabba"


def test_bits_per_byte_counts_bytes_not_tokens(small, tmp_path):
    text = tmp_path / "greek.txt"
    text.write_text("αβγδε, and ζηθ — " * 200, encoding="utf-8")
    cfg = small("data.tokenizer=char", f"data.path={text}", "train.steps=1", "train.eval_tokens=null")
    record = metrics(run(cfg))[-1]
    characters = text.read_text(encoding="utf-8")
    validation = characters[int(len(characters) * 0.9) :][1:]  # the first has no prediction
    bits = record["val/loss"] * len(validation) / math.log(2)
    assert record["val/bpb"] == pytest.approx(bits / len(validation.encode()))


def test_bfloat16_rounds_and_float32_does_not(small):
    a, b = (run(small(f"dtype={d}", "train.steps=3", f"name={d}")) for d in ("float32", "bfloat16"))
    for x, y in zip(metrics(a), metrics(b), strict=True):
        for key in {"train/loss", "val/loss"} & x.keys():
            assert x[key] == pytest.approx(y[key], rel=0.01)
            assert x[key] != y[key]
    assert all(t.dtype == torch.float32 for t in weights(b, 3).values())


def test_schedule_and_decay_are_those_of_the_configuration(small):
    cosine, linear, undecayed = (
        run(small("train.steps=12", f"name={i}", *o))
        for i, o in enumerate([[], ["optim.schedule=linear"], ["optim.weight_decay=0"]])
    )
    lr = [[r["train/lr"] for r in metrics(f) if "train/lr" in r] for f in (cosine, linear)]
    assert lr[1] == pytest.approx(
        [lr_at(s, peak=1e-3, floor=1e-4, warmup=4, total=12, shape="linear") for s in range(12)]
    )
    assert lr[0] != lr[1]
    assert not same(weights(cosine, 12), weights(undecayed, 12))


def test_mfu_is_the_share_of_a_known_peak_and_absent_for_an_unknown_one(small, monkeypatch):
    assert not any("time/mfu" in line for line in (run(small("name=a")) / "metrics.jsonl").read_text().splitlines())
    monkeypatch.setattr("training.run.peak_flops", lambda device, dtype: 1e12)
    cfg = small("name=b")
    records = [json.loads(line) for line in (run(cfg) / "metrics.jsonl").read_text().splitlines()]
    model = GPT(cfg.model, 256)
    for r in records:
        if "time/mfu" in r:
            assert r["time/mfu"] == pytest.approx(model.flops_per_token() * 4 * 32 / (r["time/step_ms"] / 1e3) / 1e12)
    assert any("time/mfu" in r for r in records)


def test_compare_metrics_are_those_of_the_recorded_curves(small):
    cfg = small("norm=rmsnorm")
    folder = run(cfg, twin_of(cfg, small("norm=layernorm")))
    loss = [
        np.array([r["train/loss"] for r in metrics(f) if "train/loss" in r])
        for f in (folder, folder.with_name("run-twin"))
    ]
    d = (loss[0] - loss[1])[cfg.optim.warmup :]
    last = [r for r in metrics(folder) if "compare/gap" in r][-1]
    assert last["step"] == 20
    assert last["compare/gap"] == pytest.approx(d[len(d) // 2 :].mean())
    assert last["compare/gap_abs"] == pytest.approx(np.abs(d).mean())
    assert last["compare/overlap"] == np.mean(np.abs(d) <= 0.02)


def test_triton_kernels_give_the_losses_of_torchs(small):
    for norm in ("rmsnorm", "layernorm"):
        a, b = (
            run(
                small(
                    f"norm={norm}", f"kernels={kernels}", "train.steps=3", "model.n_layer=1", f"name={norm}-{kernels}"
                )
            )
            for kernels in ("triton", "torch")
        )
        losses = [[r["train/loss"] for r in metrics(f) if "train/loss" in r] for f in (a, b)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_accumulated_micro_batches_equal_the_whole_batch(small):
    a, b = (run(small(f"train.accumulate={n}", "train.steps=3", f"name={n}")) for n in (1, 4))
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert x == pytest.approx(y, rel=1e-5)


def test_evaluation_covers_the_whole_split_and_does_not_depend_on_the_batch(small):
    a, b = (
        run(
            small("train.eval_tokens=null", "train.steps=1", "train.batch_size=8", f"train.accumulate={n}", f"name={n}")
        )
        for n in (1, 8)
    )
    values = [metrics(f)[0] for f in (a, b)]
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-6)
    assert values[0]["val/bpb"] == pytest.approx(values[0]["val/loss"] / math.log(2))  # one byte a token


def test_step_times_hold_no_evaluation(small, monkeypatch):
    clock, whole = [0.0], Run.evaluate

    def tick() -> float:
        clock[0] += 0.001
        return clock[0]

    def slow(self, *args):
        clock[0] += 1000
        return whole(self, *args)

    monkeypatch.setattr(time, "perf_counter", tick)
    monkeypatch.setattr(Run, "evaluate", slow)
    folder = run(small("train.eval_every=1", "train.steps=16"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [r for r in records if "time/step_ms" in r]
    assert [r["step"] for r in timed] == list(range(WARMUP_STEPS + 1, 17))
    assert all(r["time/step_ms"] < 1000 for r in timed)
    assert all("time/warmup_ms" in r for r in records if "train/loss" in r and r not in timed)


def test_divergence_stops_the_run_and_never_reaches_the_weights(small):
    cfg = small("optim.lr=1e30", "optim.warmup=0", "train.log_every=20", "checkpoint.every=1", "checkpoint.keep=20")
    with pytest.raises(Diverged, match=r"diverged at step \d+: loss .* learning rate .*step_0") as e:
        program.train([cfg])
    folder = Path(cfg.runs_dir) / "run"
    steps = checkpoint.steps_saved(folder / "checkpoints")
    assert f"step {steps[-1] + 1}" in str(e.value)
    assert all(torch.isfinite(t).all() for t in weights(folder, steps[-1]).values())
    summary = (folder / "summary.json").read_text()
    assert json.loads(summary, parse_constant=pytest.fail)["status"] == "diverged"
    last = [r for r in metrics(folder) if "train/loss" in r][-1]
    assert None in (last["train/loss"], last["train/grad_norm"])


def test_nothing_is_recorded_after_the_step_that_diverged(small, monkeypatch):
    update = training.run.guarded_update

    def bad_once(optimizer, model, *, loss, lr, clip):
        if lr == pytest.approx(lr_at(6, peak=1e-3, floor=1e-4, warmup=4, total=20)):
            loss.fill_(math.nan)
        return update(optimizer, model, loss=loss, lr=lr, clip=clip)

    monkeypatch.setattr(training.run, "guarded_update", bad_once)
    cfg = small("train.log_every=20", "train.eval_every=20")
    with pytest.raises(Diverged, match="diverged at step 7"):
        program.train([cfg])
    assert [r["step"] for r in metrics(Path(cfg.runs_dir) / "run") if "train/loss" in r] == list(range(1, 8))


def test_a_twin_that_did_not_diverge_is_not_said_to(small, monkeypatch):
    cfg, other = small("name=a", "norm=rmsnorm"), small("name=b", "optim.lr=1e30", "optim.warmup=0")
    with pytest.raises(Diverged, match="layernorm-pre diverged"):
        program.train([cfg, other])
    statuses = [json.loads((Path(cfg.runs_dir) / n / "summary.json").read_text())["status"] for n in "ab"]
    assert statuses == ["interrupted", "diverged"]


def test_a_step_behind_the_run_is_refused(small):
    run(small("train.stop_at=10"))
    with pytest.raises(UserError, match="at step 10 already"):
        program.train([small("train.stop_at=5", "resume=true", "force=true")])


def test_an_existing_run_is_not_touched(small):
    folder = run(small("train.steps=2"))
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    with pytest.raises(UserError, match=r"resume=true .* overwrite=true .* name="):
        program.train([small("train.steps=2")])
    with pytest.raises(UserError, match=r"optim.beta1: 0.9 -> 0.8.*force=true"):
        program.train([small("train.steps=2", "optim.beta1=0.8", "resume=true")])
    assert before == {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    run(small("train.steps=3", "overwrite=true"))
    assert metrics(folder)[-1]["step"] == 3


def test_a_refused_run_leaves_no_folder_and_an_overwritten_one_alone(small):
    folder = run(small("train.steps=2"))
    with pytest.raises(UserError, match="block_size"):
        program.train([small("overwrite=true", "model.block_size=100000")])
    assert metrics(folder)[-1]["step"] == 2
    with pytest.raises(UserError, match="one folder name"):
        program.train([small("name=../other")])


def test_resuming_a_finished_run_does_nothing(small, capsys):
    folder = run(small("train.steps=2"))
    before = (folder / "metrics.jsonl").read_bytes()
    run(small("train.steps=2", "resume=true"))
    assert "finished before" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("stop", [10, 20])
def test_another_text_is_not_resumed_on(small, text_file, stop):
    folder = run(small(f"train.stop_at={stop}"))
    text_file.write_text(text_file.read_text().replace("argument", "ARGUMENT"))
    with pytest.raises(UserError, match="another text"):
        program.train([small("resume=true")])
    assert metrics(folder)[-1]["step"] == stop


def test_overwrite_touches_nothing_but_a_run(small, tmp_path):
    precious = tmp_path / "runs" / "run" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    for how in ("overwrite=true", "resume=true", "overwrite=false"):
        with pytest.raises(UserError, match="something else than a run"):
            program.train([small(how)])
    assert precious.read_text() == "years of work"
    with pytest.raises(UserError, match="choose one"):
        program.train([small("overwrite=true", "resume=true", "name=other")])


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "summary.json"])
@pytest.mark.parametrize("content", ["", "{", "null"])
def test_a_damaged_record_is_an_error_or_written_anew(small, name, content):
    folder = run(small("train.steps=3"))
    (folder / name).write_text(content)
    if name == "summary.json":
        run(small("train.steps=3", "resume=true"))
        assert json.loads((folder / name).read_text())["status"] == "finished"
    else:
        with pytest.raises(UserError, match=f"{name} is damaged"):
            program.train([small("train.steps=3", "resume=true")])


def test_a_folder_made_meanwhile_is_not_shared(small, monkeypatch):
    def slow(cfg, data):
        (Path(cfg.runs_dir) / cfg.name).mkdir(parents=True)
        return Run(cfg, data)

    monkeypatch.setattr(program, "Run", slow)
    with pytest.raises(UserError, match="another process"):
        program.train([small()])


def test_auto_choices_are_taken_from_the_run_that_is_resumed(small):
    run(small("train.stop_at=10", "compile=full"))
    folder = run(small("resume=true"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["compile"] == "full"


def test_a_corrupt_checkpoint_is_passed_over(small, capsys):
    straight = run(small("name=straight"))
    folder = run(small("train.stop_at=15", "checkpoint.every=5"))
    newest = checkpoint.step_folder(folder / "checkpoints", 15) / "optim.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    run(small("resume=true", "checkpoint.every=0"))
    assert "step 15 cannot be resumed from" in capsys.readouterr().err
    assert (folder / "checkpoints" / "unused_step_00000015").exists()
    assert metrics(folder) == metrics(straight)
    assert same(weights(folder, 20), weights(straight, 20))
    for f in folder.glob("checkpoints/step_*/state.json"):
        f.write_text("{")
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        program.train([small("resume=true")])


def test_the_best_weights_are_kept_apart(small, monkeypatch):
    losses = iter([2.0, 1.5, 1.9])
    whole = Run.keep_best
    monkeypatch.setattr(Run, "keep_best", lambda self, step, loss: whole(self, step, next(losses)))
    folder = run(small())
    state = json.loads((folder / "checkpoints" / "best" / "state.json").read_text())
    assert state == {"step": 10, "val_loss": 1.5}
    assert checkpoint.steps_saved(folder / "checkpoints") == [20]


def test_no_space_left_names_the_file_and_keeps_what_was_saved(small, monkeypatch):
    cfg = small("checkpoint.every=5")
    whole = checkpoint.save_file

    def full(named, path):
        if "00000015" in str(path):
            raise OSError(28, os.strerror(28), str(path))
        whole(named, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        program.train([cfg])
    folder = Path(cfg.runs_dir) / "run"
    assert checkpoint.steps_saved(folder / "checkpoints") == [5, 10]
    assert not list(folder.glob("checkpoints/.*"))
    monkeypatch.undo()
    os.environ["WANDB_MODE"] = "disabled"
    run(small("checkpoint.every=5", "resume=true"))
    assert metrics(folder) == metrics(run(small("name=straight", "checkpoint.every=5")))


@pytest.fixture
def overrides(tmp_path, text_file) -> list[str]:
    return [
        "data=text", f"data.path={text_file}", f"data.cache_dir={tmp_path}/tokens",
        f"runs_dir={tmp_path}/runs", "name=run", "norm=rmsnorm", "against=layernorm",
        "device=cpu", "model.n_layer=1", "model.n_embd=16", "model.n_head=1", "model.block_size=16",
        "train.batch_size=2", "train.eval_tokens=64", "train.sample_chars=0", "train.log_every=1", "train.steps=3000",
    ]  # fmt: skip


def test_a_signal_in_the_last_evaluation_ends_the_process_after_it(small, monkeypatch):
    whole = Run.evaluate

    def interrupted(self, step, *args):
        if step == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, step, *args)

    monkeypatch.setattr(Run, "evaluate", interrupted)
    cfg = small()
    with pytest.raises(SystemExit) as e:
        program.train([cfg])
    assert e.value.code == 130
    assert json.loads((Path(cfg.runs_dir) / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, overrides, number):
    process = subprocess.Popen([sys.executable, "train.py", *overrides], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step 20/"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    line = err.strip().splitlines()[-1].strip()
    assert line.startswith("python train.py")
    assert line.endswith("resume=true")
    folder = tmp_path / "runs" / "run"
    (stopped,) = checkpoint.steps_saved(folder / "checkpoints")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    again = [sys.executable, *line.split()[1:], f"train.stop_at={stopped + 5}"]
    subprocess.run(again, cwd=ROOT, check=True, capture_output=True, text=True)
    steps = [r["step"] for r in metrics(folder) if "train/loss" in r]
    assert steps == list(range(1, stopped + 6))


def test_ctrl_c_ends_a_sweep(tmp_path, overrides):
    args = ["-m", "seed=1,2,3", *(o for o in overrides if not o.startswith("name="))]
    process = subprocess.Popen(
        [sys.executable, "train.py", *args], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    for line in process.stderr:
        if line.startswith("step 5/"):
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 2  # one job's twins


def test_wandb_offline_is_read_by_wandbs_own_reader(small, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    cfg = small("norm=rmsnorm")
    folder = run(cfg, twin_of(cfg, small()))
    for f in (folder, folder.with_name("run-twin")):
        (log,) = f.glob("wandb/offline-run-*/*.wandb")
        leet = [Path(sys.executable).parent / "wandb", "leet", "inspect", "--json", log]
        out = subprocess.run(leet, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in out.splitlines()]
        history = [r["history"]["item"] for r in records if r["type"] == "history"]
        assert [r["train/loss"] for r in history if "train/loss" in r] == [
            r["train/loss"] for r in metrics(f) if "train/loss" in r
        ]
        names = set().union(*history)
        assert names >= {"train/loss", "train/grad_norm", "train/lr", "val/loss", "val/bpb", "step", "tokens"}
        assert names >= {"time/step_ms", "time/tokens_per_s", "time/data_ms", "time/eval_ms"}
        shown = subprocess.run([*leet, "--summary"], capture_output=True, text=True, check=True).stdout
        summary = json.loads((f / "summary.json").read_text())
        measured = {k: v for k, v in summary.items() if v is not None}
        assert {k: json.loads(shown)["summary"][k] for k in measured} == pytest.approx(measured)
        config = next(r["run"]["config"]["update"] for r in records if r["type"] == "run")
        saved = yaml.safe_load((f / "config.yaml").read_text())
        assert {k: config[k] for k in saved if k not in ("model", "optim", "train")} == {
            k: saved[k] for k in saved if k not in ("model", "optim", "train")
        }
        assert config["model"]["norm"]["kind"] == saved["model"]["norm"]["kind"]


def test_a_run_without_network_or_key_neither_prompts_nor_stalls(tmp_path, overrides):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    args = [o for o in overrides if not o.startswith(("against", "train.steps"))] + ["train.steps=5"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "train.py", *args], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert list((tmp_path / "runs" / "run" / "wandb").glob("offline-run-*"))


def test_an_unreachable_wandb_costs_seconds_and_one_line(tmp_path, overrides):
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    args = [o for o in overrides if not o.startswith("train.steps")] + ["train.steps=5"]
    done = subprocess.run([sys.executable, "train.py", *args], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("out of reach") == 1  # both twins learn of it once
    for name in ("run", "run-layernorm"):
        assert list((tmp_path / "runs" / name / "wandb").glob("offline-run-*"))


def test_torchrun_is_refused(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        program.train([small()])


def test_nanogpts_cpu_setting_on_tinyshakespeare(small, tinyshakespeare, tmp_path):
    """nanoGPT publishes 1.88 for this setting; a LLaMA-style model of equal size is to stay below 1.75."""
    done = subprocess.run(
        [sys.executable, "train.py", "experiment=nanogpt_cpu", f"data.path={tinyshakespeare}", "norm=rmsnorm",
         "against=layernorm", "name=run", "device=cpu", "train.eval_every=2000",
         f"runs_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/tokens"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"WANDB_MODE": "disabled"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("run", "run-layernorm"):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        assert summary["val/loss"] <= 1.75
