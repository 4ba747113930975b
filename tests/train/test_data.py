"""Runs on real data's forms: streams that are stopped, document masks, tokenizers that differ, token files."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import train
from configs.schema import Config
from data.tokens import open_tokens
from errors import UserError
from tests.conftest import ROOT
from tests.train.ranks import train_on
from tests.train.runs import metrics, run, same, twin_of, weights
from training import run as module
from training.run import Run


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")


@pytest.fixture
def stories(tmp_path) -> Path:
    """400 documents in three files."""
    folder = tmp_path / "stories"
    folder.mkdir()
    docs = [f"story {i}: " + "once upon a time " * (i % 11) for i in range(400)]
    for i in range(3):
        pq.write_table(pa.table({"text": docs[i::3]}), folder / f"train-0000{i}-of-00003.parquet")
    return folder


@pytest.fixture
def streamed(small, stories):
    def compose(*overrides: str):
        unset = [f"data.name='{stories}'", "data.path=null", "data.stream=true"]
        return small("data=hub", *unset, *overrides)

    return compose


def test_a_stream_that_is_stopped_goes_on_bit_for_bit(streamed):
    whole = run(streamed("name=whole"))
    run(streamed("name=cut", "train.stop_at=7"))
    state = json.loads((whole.parent / "cut/checkpoints/latest/state.json").read_text())
    assert [set(p) for p in state["positions"]] == [{"state", "used"}]
    cut = run(streamed("name=cut", "resume=true"))
    assert metrics(cut) == metrics(whole)
    assert same(weights(cut, 20), weights(whole, 20))


def test_twins_take_the_same_stream(streamed):
    alone = run(streamed("name=alone", "norm=layernorm"))
    cfg = streamed("name=pair", "norm=rmsnorm")
    run(cfg, twin_of(cfg, streamed("norm=layernorm")))
    losses = [[r["train/loss"] for r in metrics(f) if "train/loss" in r] for f in (alone, alone.parent / "pair-twin")]
    assert losses[0] == losses[1]


@pytest.mark.seconds(20)
def test_a_stream_of_two_processes_goes_on_with_one(streamed):
    """And gives the batches of one process with as many parts, up to the order of sums."""
    alone = run(streamed("name=alone", "data.parts=2"))
    train_on(2, streamed("name=two", "dist.strategy=ddp", "train.stop_at=9"))
    two = run(streamed("name=two", "resume=true"))
    losses = [[r["train/loss"] for r in metrics(folder) if "train/loss" in r] for folder in (alone, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    assert json.loads((two / "environment.json").read_text())["processes"] == 1


def test_parts_that_cannot_be_shared_are_refused(streamed):
    with pytest.raises(
        UserError, match=r"data\.parts=3 cannot be shared by 1 processes in batches of 4; these can: 1, 2, 4"
    ):
        run(streamed("data.parts=3"))


def test_a_stream_is_not_resumed_on_other_documents(streamed, stories):
    run(streamed("train.stop_at=5"))
    pq.write_table(pa.table({"text": ["another"] * 50}), stories / "train-00000-of-00003.parquet")
    with pytest.raises(UserError, match=r"is another text \(corpus_sha256 differs\)"):
        run(streamed("resume=true"))


@pytest.mark.seconds(20)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_stream_that_is_killed_goes_on_bit_for_bit(streamed, tmp_path):
    whole = run(streamed("name=whole", "checkpoint.every=3"))
    cfg = streamed("name=killed", "checkpoint.every=3", "resume=true")
    for n in (4, 11):
        pid = os.fork()
        if pid == 0:
            killed_in_step(n, cfg)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    killed = run(cfg)
    assert metrics(killed) == metrics(whole)
    assert same(weights(killed, 20), weights(whole, 20))


def killed_in_step(n: int, cfg: Config) -> None:
    """Trains, in a process of its own, until the n-th step is under way."""
    update, calls = module.guarded_update, itertools.count(1)

    def mortal(*args, **kwargs):
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(*args, **kwargs)

    module.guarded_update = mortal
    try:
        train.train([cfg])
    finally:
        os._exit(1)


def test_a_document_mask_trains_and_differs(small, text_file, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for i, part in enumerate(text_file.read_text().split("\n\n")):
        (many / f"{i:04}.txt").write_text(part)
    losses = []
    for mask in ("true", "false"):
        folder = run(small(f"name={mask}", f"data.path='{many}'", f"data.document_mask={mask}"))
        losses.append([r["train/loss"] for r in metrics(folder) if "train/loss" in r])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-2)
    assert losses[0] != losses[1]


def test_a_document_mask_needs_documents(small):
    for tokenizer in ("char", "bytes"):  # the text is one, whether or not its tokenizer could separate more
        with pytest.raises(UserError, match=r"data\.document_mask=true needs documents with end-of-text"):
            run(small(f"data.tokenizer={tokenizer}", "data.document_mask=true"))


def test_bits_per_byte_are_those_of_the_text_alone(small, tmp_path):
    """A model that pays 8 bits for every token pays 8 a byte of text, whatever it pays for end-of-text."""
    many = tmp_path / "many"
    many.mkdir()
    for i in range(200):
        (many / f"{i:03}.txt").write_text("twelve bytes")
    cfg = small(
        f"data.path='{many}'",
        "train.steps=1",
        "kernels=torch",
        "optim.warmup=1",
        "train.eval_tokens=null",
        "model.tie_embeddings=false",
    )
    data = open_tokens(cfg.data, print)
    made = Run(cfg, data)
    made.tracker.log = lambda records: None
    made.keep_best = lambda *_: None
    with torch.no_grad():
        made.model.head.weight.zero_()  # every id is as likely as any
    _, val = train.build_batches(cfg, data)
    record = made.evaluate(0, *val)
    assert record["val/loss"] == pytest.approx(math.log(257), rel=1e-6)
    assert record["val/bpb"] == pytest.approx(math.log2(257), rel=1e-6)


def test_each_loss_is_what_the_mean_is_of(small):
    cfg = small("data.tokenizer=char", "kernels=torch")
    made = Run(cfg, open_tokens(cfg.data, print))
    x, y = (torch.from_numpy(t) for t in train.build_batches(cfg, made.data)[0](0))
    y[0, :5] = -100
    each = made.model(x, y, each=True)
    assert each.shape == y.shape
    assert not each[0, :5].any()
    assert each.sum().item() / (y >= 0).sum().item() == pytest.approx(made.model(x, y).item(), rel=1e-6)


def test_padding_of_the_vocabulary_changes_no_loss(small):
    """The head's rows of padding have no part in it; those of the data begin alike."""
    losses = []
    for multiple in (1, 64):
        folder = run(small(f"name=m{multiple}", "data.tokenizer=char", f"model.vocab_multiple={multiple}", "seed=3"))
        losses.append([r["train/loss"] for r in metrics(folder) if "train/loss" in r])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_prepared_tokens_are_trained_on_as_token_files(small, tmp_path):
    first = run(small("name=first"))
    (folder,) = (tmp_path / "tokens").glob("[!.]*")
    again = run(small("data=bin", "name=again", f"data.path='{folder}'", "data.tokenizer=bytes"))
    assert metrics(again) == metrics(first)


def test_a_tokenizer_other_than_the_datas_is_refused(small, tmp_path):
    run(small("name=first", "train.stop_at=2"))
    (folder,) = (tmp_path / "tokens").glob("[!.]*")
    with pytest.raises(UserError, match=r"holds tokens of bytes; data\.tokenizer=bytes"):
        run(small("data=bin", "name=again", f"data.path='{folder}'"))


def test_the_share_of_time_that_data_take_is_small(small):
    """Under 1 % of a step, as the median has it."""
    folder = run(small("model.n_embd=128", "model.n_layer=4", "model.block_size=128", "train.batch_size=16"))
    records = [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "time/step_ms" in r]
    assert np.median([r["time/data_ms"] / r["time/step_ms"] for r in records]) < 0.01


def test_ctrl_c_while_preparing_leaves_a_line_and_goes_on(tmp_path):
    (tmp_path / "a.txt").write_text("a line of words\n" * 8_000_000)
    words = ["data=text", f"data.path={tmp_path}/a.txt", "data.tokenizer=bytes", f"data.cache_dir={tmp_path}/cache"]
    command = [sys.executable, "-m", "scripts.prepare", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob(".*.part/*.bin.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "prepared 128.0 M tokens" in done.stdout
