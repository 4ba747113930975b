"""Run folders whose curves are known, written as train.py writes them but without training."""

import json
import zlib
from pathlib import Path

import numpy as np
import yaml

BATCHES = {"0": "a0", "1": "a1", "100": "a2"}
ENVIRONMENT = {
    "versions": {"python": "3.11", "torch": "2.13.0", "triton": None},
    "device": "a CPU", "cpu": "a CPU", "cpu_count": 2, "threads": 2, "openmp": {}, "machine": "m",
    "git_commit": "abc123",
    "data": {"corpus_sha256": "c0ffee", "tokenizer": {"kind": "bytes", "sha256": "b0"}},
    "batch_hashes": BATCHES,
}  # fmt: skip


def config(norm: str = "layernorm", placement: str = "pre", seed: int = 1, **changes) -> dict:
    """A run's config.yaml; `changes` go by dotted key with __ for the dot."""
    whole = {
        "model": {"norm": {"kind": norm, "eps": 1e-5}, "placement": placement, "block_size": 64, "n_layer": 4},
        "data": {"tokenizer": "bytes", "path": None},
        "optim": {"warmup": 100, "lr": 1e-3},
        "train": {"batch_size": 16, "steps": 1000},
        "compare": {"tolerance": 0.02, "margin": 0.01},
        "seed": seed, "data_seed": changes.pop("data_seed", 1), "name": "given by its folder", "against": None,
    }  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split("__")
        node = whole
        for part in path:
            node = node[part]
        node[last] = value
    return whole


def curve(steps: int, *, offset: float = 0.0, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """A loss that falls from 5.5 towards 1.4, plus an offset and noise of its own, (steps,)."""
    t = np.arange(1, steps + 1)
    batch = np.random.default_rng(12345).standard_normal(steps) * 0.03  # the batches' own, common to all
    own = np.random.default_rng(seed).standard_normal(steps) * noise
    return 1.4 + 4.1 * np.exp(-t / (steps / 8)) + batch + offset + own


def write_run(
    folder: Path, cfg: dict, loss: np.ndarray, *, step_ms: float = 10.0,
    waits: np.ndarray | None = None, eval_every: int = 100, val_noise: float = 0.0,
    status: str | None = "finished", environment: dict | None = None, bytes_per_token: float = 1.0, tail: str = "",
) -> Path:  # fmt: skip
    """`loss` becomes the training curve and, at every eval_every-th step, the validation loss; `tail` ends the file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    per_step = cfg["train"]["batch_size"] * cfg["model"]["block_size"]
    times = step_ms * np.exp(rng.standard_normal(len(loss)) * 0.05)
    if waits is not None:
        times *= np.where(waits > 0.01, 3 + 2 * rng.random(), 1)  # disturbed, and not both alike
    lines = []
    for step in range(len(loss) + 1):
        common = {"step": step, "tokens": step * per_step}
        if step:
            value = float(loss[step - 1])
            clock = "time/step_ms" if step > 10 else "time/warmup_ms"
            record = common | {"train/lr": 1e-3, "time/data_ms": 0.1, clock: times[step - 1], "train/grad_norm": 1.0}
            record |= {} if waits is None else {"time/wait_share": waits[step - 1]}
            lines.append(record | {"train/loss": value if np.isfinite(value) else None})
        if step % eval_every == 0 or step == len(loss):
            value = float(loss[max(step - 1, 0)]) + val_noise
            if np.isfinite(value):
                bits = value / np.log(2) / bytes_per_token
                lines.append(common | {"val/loss": value, "val/bpb": bits, "time/eval_ms": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (folder / "config.yaml").write_text(yaml.safe_dump(cfg, sort_keys=False))
    (folder / "environment.json").write_text(json.dumps(environment or ENVIRONMENT))
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status, "step": len(loss)}))
    return folder


def write_sweep(
    place: Path, *, norms=("layernorm", "rmsnorm"), placements=("pre",), seeds=(1, 2, 3), steps=1000, **how
) -> list[Path]:
    """Every combination; RMSNorm lies 0.004 nats below LayerNorm, post 0.05 above pre, and seeds spread by 0.01."""
    folders = []
    for placement in placements:
        for norm in norms:
            for seed in seeds:
                common = np.random.default_rng(seed).standard_normal() * 0.01  # shared by a seed's variants
                own = np.random.default_rng([seed, len(norm), len(placement)]).standard_normal() * 0.002
                offset = common + own - 0.004 * (norm == "rmsnorm") + 0.05 * (placement == "post")
                loss = curve(steps, offset=offset, noise=0.005, seed=zlib.crc32(f"{norm} {placement} {seed}".encode()))
                cfg = config(norm, placement, seed, data_seed=seed)
                folder = place / f"{norm}-{placement}-s{seed}"
                start = f"2026-01-01T{len(folders):02}"  # one after the other
                environment = ENVIRONMENT | {"started": start, "lockstep": []}
                write_run(
                    folder, cfg, loss, step_ms=10.5 if norm == "rmsnorm" else 10.0, environment=environment, **how
                )
                (folder / "summary.json").write_text(json.dumps({"status": "finished", "ended": f"{start}:30"}))
                folders.append(folder)
    return folders
