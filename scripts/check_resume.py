"""Kills runs at random moments, resumes each until it is done, and holds it against an undisturbed one, bit by bit.

python -m scripts.check_resume [runs=50] [kills=4] [seed=0] [to=results/resume/kills.json]

A run is killed up to `kills` times, by SIGKILL: at any time, or before, in the middle of, or after a step, a record in
metrics.jsonl, a file of a checkpoint, a rename, a removal of an old checkpoint. Linux alone, since each process is a
fork of this one, which has PyTorch loaded already.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import train as program
from configs.schema import Config
from configs.twin import composed
from errors import UserError
from scripts.options import run_script
from scripts.results import table, write
from training import checkpoint, run, tracker

OVERRIDES = [
    "device=cpu", "compile=eager", "wandb.mode=disabled", "compare.report=false", "model.n_layer=2", "model.n_head=2",
    "model.n_embd=32", "model.block_size=32", "model.dropout=0.1", "train.steps=60", "train.batch_size=4",
    "train.eval_tokens=256", "train.eval_every=10", "train.log_every=4", "train.sample_chars=0", "checkpoint.every=3",
    "optim.warmup=4",
]  # fmt: skip
PLACES = {  # what a run does again and again: where it is, and how many times a run does it, about
    "step": (run, "guarded_update", 60),
    "record": (tracker.json, "dumps", 80),
    "file of a checkpoint": (checkpoint, "serialize_file", 50),
    "checksum": (checkpoint, "_digest", 80),
    "rename": (Path, "rename", 30),
    "link": (Path, "symlink_to", 20),
    "removal": (shutil, "rmtree", 100),
}


@dataclass
class Options:
    runs: int = 50
    kills: int = 4
    seed: int = 0
    to: str | None = None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(place: str, call: int, when: str) -> None:
    """Has this process die before, after or in the middle of that call of PLACES[place]."""
    owner, name, _ = PLACES[place]
    whole, calls = getattr(owner, name), 0

    def mortal(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls != call:
            return whole(*args, **kwargs)
        if when == "before":
            die()
        if when == "amid" and place == "file of a checkpoint":
            whole(*args, **kwargs)
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        elif when == "amid" and place == "record":
            writer = sys._getframe(1).f_locals.get("self")
            if writer is not None:
                writer.file.write(whole(*args, **kwargs)[:20])
                writer.file.flush()
        elif when == "amid" and place == "removal":
            next((f for f in Path(args[0]).glob("*")), Path("/nowhere")).unlink(missing_ok=True)
        else:
            whole(*args, **kwargs)
        die()

    setattr(owner, name, mortal)


def forked(cfg: Config, prepare: Callable[[], None] = lambda: None) -> int:
    """Trains in a process of its own; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(log_of(cfg), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        prepare()
        program.train([cfg])
        status = 0
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    """How a process ended: its exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(cfg: Config, rng: random.Random, share: float, seconds: float) -> str | None:
    """Starts or resumes a run, of which about `share` of so many seconds is left, and has it killed; says where.

    None if it was done.
    """
    place = where = rng.choice(["any time", *PLACES])
    if place == "any time":
        pid = forked(cfg)
        time.sleep(rng.uniform(0, share * seconds))
        os.kill(pid, signal.SIGKILL)
    else:
        when, call = rng.choice(["before", "amid", "after"]), rng.randint(1, max(1, int(share * PLACES[place][2])))
        where = f"{when} a {place}"
        pid = forked(cfg, lambda: die_at(place, call, when))
    status = ended(pid)
    if status not in (0, -signal.SIGKILL):
        raise UserError(f"a resumed run failed with exit status {status}: {log_of(cfg).read_text()}")
    return where if status else None


def log_of(cfg: Config) -> Path:
    return Path(cfg.runs_dir) / f"{cfg.name}.log"


def outcome(folder: Path) -> dict[str, bytes]:
    """All that must be equal: records without times, weights and moments of the last and the best checkpoint."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]
    files = {"metrics.jsonl": json.dumps(records).encode()}
    last = checkpoint.step_folder(Path(), checkpoint.steps_saved(folder / "checkpoints")[-1])
    for name in (last, Path("best")):
        found, _ = checkpoint.check(folder / "checkpoints" / name)
        files |= {f"{name}/{f.name}": f.read_bytes() for f in found.glob("*.safetensors")}
    return files


def main(options: Options) -> None:
    if options.runs < 1 or options.kills < 1:
        raise UserError(f"runs={options.runs} and kills={options.kills} must be at least 1")
    if not hasattr(os, "fork"):
        raise UserError("check_resume needs a system that forks processes")
    rng, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(Path(random.__file__).read_text())
        data = ["data=text", f"data.path={text}", f"data.cache_dir={folder}/tokens", f"runs_dir={folder}"]
        names = ["undisturbed", *(f"run{n}" for n in range(options.runs))]
        configs = [composed(*OVERRIDES, *data, f"name={name}", "resume=true") for name in names]
        began = time.monotonic()
        if status := ended(forked(configs[0])):
            raise UserError(f"the undisturbed run failed with exit status {status}")
        seconds, expected = time.monotonic() - began, outcome(Path(folder) / "undisturbed")
        for n, cfg in enumerate(configs[1:]):
            shares = [1 - k / options.kills for k in range(options.kills)]
            places = list(itertools.takewhile(bool, (killed(cfg, rng, share, seconds) for share in shares)))
            if status := ended(forked(cfg)):
                raise UserError(f"{cfg.name} failed with exit status {status}: {log_of(cfg).read_text()}")
            ours = outcome(Path(folder) / cfg.name)
            differing = sorted(name for name in ours.keys() | expected.keys() if ours.get(name) != expected.get(name))
            rows.append({"run": n, "killed": "; ".join(places), "differs in": ", ".join(differing) or "nothing"})
            print(f"run {n}: killed {rows[-1]['killed']}: differs in {rows[-1]['differs in']}", flush=True)
    print(render(rows))
    if options.to:
        write(options.to, rows)
    if any(row["differs in"] != "nothing" for row in rows):
        sys.exit(1)


def render(rows: list[dict]) -> str:
    """How often runs were killed where, and how many came out as the undisturbed one."""
    places = Counter(place for row in rows for place in filter(None, row["killed"].split("; ")))
    same = sum(row["differs in"] == "nothing" for row in rows)
    lines = [["killed", "times"], *([place, str(count)] for place, count in sorted(places.items()))]
    lines.append(["all", str(places.total())])
    return f"{table(lines)}\n\n{same} of {len(rows)} runs end with the weights and records of an undisturbed one"


if __name__ == "__main__":
    run_script(main, Options, __doc__)
