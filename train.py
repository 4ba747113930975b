"""Train a GPT, or two that differ in one word, and say what the word changed.

    python train.py norm=rmsnorm against=layernorm

Reads from top to bottom: build, loop, summary. The network is in model/, what a run is made of in training/.
"""

from training.process import forget_process_peak, keep_freed_memory, process_peak_mib  # before torch  # isort: skip

import re
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from rich.text import Text

from compare.comparison import compare
from compare.report import comparison_rows, console, shown, summary_table, write_comparison
from compare.stats import gap, paired_ratios
from configs.cli import command
from configs.schema import Config
from data.loader import TrainBatches, eval_blocks
from data.stream import StreamBatches
from data.tokens import TokenData, open_tokens
from errors import UserError
from model.config import NormKind
from records import load_run, siblings
from training.checkpoint import Writer
from training.config import WandbConfig
from training.device import make_deterministic, settle
from training.distributed import ALONE, World, joined, launch, settle_parts
from training.environment import command as typed_command
from training.environment import describe
from training.feed import Feed
from training.folder import check_folder, claimed, finished_summary, folder_of
from training.one_thread import STEPS, needed, time_by_one_thread
from training.optim import parameter_groups
from training.run import Diverged, Run, resume
from training.stop import StopSignal, exit_status
from training.terminal import Screen
from training.tracker import Tracker
from training.trial import settle_compile
from training.wandb_page import log_comparison_run, wandb_mode


def train(configs: list[Config]) -> float:
    """Trains one run, or two in lockstep on the same batches; returns the first one's final validation loss."""
    with joined(configs[0]) as world:
        return train_in(world, world.together(lambda: settled(configs, world)))


def settled(configs: list[Config], world: World) -> list[Config]:
    """The configs of runs that may begin here, without any `auto` that can be settled by now."""
    for cfg in configs:
        check_folder(cfg)
        settle(cfg)
        settle_parts(cfg, world.size)
    return configs


def train_in(world: World, configs: list[Config]) -> float:
    """`train`, in a world of one process or more."""
    make_deterministic(configs[0].device, configs[0].deterministic)
    keep_freed_memory()
    n_val = configs[0].train.eval_tokens and configs[0].train.eval_tokens + configs[0].model.block_size
    data = world.in_turn(lambda: open_tokens(configs[0].data, world.say, val_tokens=n_val))
    records = world.gathered(lambda: data.record)
    done = world.together(lambda: [finished_summary(cfg, records) for cfg in configs])
    folders = [folder_of(cfg) for cfg in configs]
    if all(done):
        world.say(f"{' and '.join(cfg.name for cfg in configs)}: finished before")
        world.together(lambda: report(configs[0], done, folders), patient=True)
        return done[0]["val/loss"]

    batches, val = build_batches(configs[0], data)
    with ExitStack() as stack:
        world.together(lambda: stack.enter_context(claimed(folders)))
        trial = settle_compile(configs, data, batches, world.say)
        writer = Writer()
        stack.callback(writer.close)
        return train_claimed([Run(cfg, data, world, writer) for cfg in configs], batches, val, trial)


def train_claimed(
    runs: list[Run], batches: TrainBatches, val: tuple[torch.Tensor, torch.Tensor], trial: dict | None
) -> float:
    """`train`, once the folders are its own and what compile=auto means is known."""
    cfg, data, world = runs[0].cfg, runs[0].data, runs[0].world
    forget_process_peak()
    start = resume(runs) if cfg.resume else 0
    batches.go_to(start, runs[0].positions)
    if cfg.init_from and not start:
        for run in runs:
            run.init_from(Path(cfg.init_from))
    if start > cfg.train.last_step:
        raise UserError(f"{runs[0].folder} is at step {start} already, beyond train.stop_at={cfg.train.stop_at}")
    environment = describe(runs[0].device) | {
        "processes": world.size,
        "strategy": world.strategy if world.size > 1 else None,
        "launch": launch(),
        "lockstep": [run.cfg.name for run in runs] if len(runs) > 1 else [],
        "data": {k: v for k, v in data.record.items() if k not in ("token_bytes", "shards")},
        "batch_hashes": batches.hashes(),
        "compile_trial": trial,
    }
    mode = wandb_mode(cfg.wandb.mode)
    with ExitStack() as stack:
        for run in runs:
            mode = world.together(lambda run=run, mode=mode: run.open(environment, mode=mode))
            stack.callback(run.close)
        announce(runs, start)
        if trial:
            world.say(f"compile=auto chose {trial['chosen']}: {trial['why']}")
        statuses = dict.fromkeys(runs, "failed")
        try:
            signal = loop(runs, batches, val, start)
            finished = len(runs[0].losses) == cfg.train.last_step
            statuses = dict.fromkeys(runs, "finished" if finished else "interrupted")
        except Diverged as e:
            statuses = dict.fromkeys(runs, "interrupted") | {e.run: "diverged"}
            raise
        except KeyboardInterrupt:
            statuses = dict.fromkeys(runs, "interrupted")
            raise
        finally:
            peak = process_peak_mib()
            summaries = [run.summarize(statuses[run], peak) for run in runs]
            if cfg.compile != "eager":
                torch.compiler.reset()  # a sweep's next job starts with no compiled code of this one
        if finished:
            n_chars = 0 if signal else cfg.train.sample_chars
            written = [run.sample(n_chars) for run in runs] if n_chars else []
            samples = dict(zip(labels(runs), written, strict=False))
            folders, tracker = [run.folder for run in runs], runs[0].tracker
            world.together(lambda: report(cfg, summaries, folders, samples, tracker), patient=True)
    if not finished:
        world.say(f"stopped and saved after step {len(runs[0].losses)}; to go on:\n  {resume_command()}")
    if signal:
        sys.exit(exit_status(signal))
    return runs[0].val_loss


def words_typed() -> list[str]:
    """The command line, without what says how to treat a run of the same name."""
    return [word for word in shlex.split(typed_command()) if word not in ("overwrite=true", "resume=true")]


def resume_command() -> str:
    """What continues this run; a sweep resumes by itself."""
    words = words_typed()
    return shlex.join(words if "-m" in words else [*words, "resume=true"])


def sibling_command(cfg: Config) -> str:
    """What trains the run that differs from this one in the norm alone."""
    other = next(norm for norm in (NormKind.layernorm, NormKind.rmsnorm) if norm != cfg.model.norm.kind)
    return shlex.join([*(w for w in words_typed() if not w.startswith(("norm=", "name="))), f"norm={other}"])


def build_batches(cfg: Config, data: TokenData) -> tuple[TrainBatches, tuple[torch.Tensor, torch.Tensor]]:
    """Training batches, and the fixed validation blocks (x, y), each (N, T)."""
    block_size, kind = cfg.model.block_size, StreamBatches if cfg.data.stream else TrainBatches
    batches = kind(data.train, block_size=block_size, batch_size=cfg.train.batch_size, seed=cfg.data_seed)
    x, y = eval_blocks(data.val, block_size=block_size, n_tokens=cfg.train.eval_tokens)
    return batches, (torch.from_numpy(x), torch.from_numpy(y))


def labels(runs: list[Run]) -> list[str]:
    """What tells the runs of this process apart."""
    alike = len({run.label for run in runs}) < len(runs)
    return [f"{run.label}, seed={run.cfg.seed}" if alike else run.label for run in runs]


def announce(runs: list[Run], start: int) -> None:
    cfg, data, world, say = runs[0].cfg, runs[0].data, runs[0].world, runs[0].world.say
    for run, label in zip(runs, labels(runs), strict=True):
        decayed, rest = (sum(p.numel() for p in g["params"]) for g in parameter_groups(run.model, run.cfg.optim))
        say(f"{label}: {run.model.num_params():,} parameters, {decayed:,} decayed and {rest:,} not")
    padded = runs[0].model.vocab_size - data.vocab_size
    say(f"data: {data}" + (f" padded by {padded}" if padded else ""))
    where = f" on each of {world.size} processes ({world.strategy})" if world.size > 1 else ""
    tokens = cfg.train.batch_size * cfg.model.block_size
    say(f"{tokens:,} tokens a step, in {cfg.train.accumulate} micro-batches{where}")
    say(
        f"device {cfg.device}, {cfg.dtype}, kernels {cfg.kernels}, compile {cfg.compile}, "
        f"{torch.get_num_threads()} threads; step {start} of {cfg.train.last_step}"
    )
    if cfg.device == "cpu" and cfg.dtype == "bfloat16":
        say("bfloat16 on a CPU without native support is many times slower than float32")


def loop(runs: list[Run], batches: TrainBatches, val: tuple[torch.Tensor, torch.Tensor], start: int) -> int | None:
    """Steps every run on the same batches until the last step or a signal; returns the signal's number, if one came."""
    cfg, world, writer = runs[0].cfg, runs[0].world, runs[0].writer
    feed, last, warned, asked = Feed(batches, runs[0].device, world), cfg.train.last_step, False, None
    screen = Screen(labels(runs), start=start, last=last, shown=world.first)
    with screen, StopSignal() as stop, world.watched():
        for step in range(start, last + 1):
            if step % cfg.train.eval_every == 0 or step == last:
                screen.evaluated(step, [run.evaluate(step, *val) for run in runs])
                if len(runs) == 2:
                    compare_live(*runs, step)
            if step == last:
                writer.finish()
                if needed(runs) and not stop:
                    screen.say(f"timing {STEPS} more steps of both by one thread, since another process has the cores")
                    time_by_one_thread(runs, batches, step=last, stop=stop)
                return max(world.gathered(lambda number=asked or stop.number or 0: number))
            began = time.perf_counter()
            x, y = feed(step)
            data_ms = 1e3 * (time.perf_counter() - began)
            for run in runs if step % 2 == 0 else reversed(runs):  # ABBA: neither twin always goes first
                run.step(step, x, y, data_ms)

            done = step + 1
            asked = world.highest(stop.number or int(writer.failed))  # read once: a signal may come at any line
            save = asked or done == last or (cfg.checkpoint.every and done % cfg.checkpoint.every == 0)
            if save or done % cfg.train.log_every == 0 or done % cfg.train.eval_every == 0:
                records = [run.flush() for run in runs]
                screen.show(done, records)
                for run, new in zip(runs, records, strict=True):
                    run.check(new)
                if not warned and world.size == 1 and (warned := runs[0].crowded):
                    screen.say(
                        "another process has the cores: the times of most steps do not count. End it, or leave it one: "
                        f"OMP_NUM_THREADS={max(torch.get_num_threads() - 1, 1)} {shlex.join(words_typed())}"
                    )
            if save:
                positions = [p for own in world.gathered(lambda done=done: batches.position(done)) for p in own]
                for run in runs:
                    run.save(done, positions)
                for run in runs:
                    run.prune()
            if asked and done < last:
                writer.finish()
                return asked


def compare_live(candidate: Run, baseline: Run, step: int) -> None:
    """Records on the candidate how far it lies from its twin so far, by the definitions of the final comparison."""
    cfg = candidate.cfg
    apart = np.subtract(candidate.losses, baseline.losses)[cfg.optim.warmup :]
    so_far = gap(apart, tolerance=cfg.compare.tolerance)
    if so_far is None:
        return
    ratios = paired_ratios(np.array(baseline.step_ms), np.array(candidate.step_ms))
    record = {"step": step, "tokens": step * cfg.train.batch_size * cfg.model.block_size}
    record |= {"compare/gap": so_far.gap, "compare/gap_abs": so_far.gap_abs, "compare/overlap": so_far.overlap}
    if len(ratios):
        record["compare/step_time_ratio"] = float(np.median(ratios))
    candidate.tracker.log([record])


def report(
    cfg: Config, summaries: list[dict], folders: list[Path], samples: dict | None = None, tracker: Tracker | None = None
) -> None:
    """The table a run ends with, what separates it from its twin, or else from finished siblings, and its writing.

    The comparison goes into the run's folder, and on its W&B page.
    """
    others = folders[1:] or (siblings(folders[0]) if cfg.compare.report else [])
    result = compare([load_run(folder) for folder in (*others, folders[0])], last_only=True) if others else None
    parts = [shown(result) if result else summary_table(summaries)]
    if cfg.compare.report and not others:
        parts.append(f"\nno finished sibling to compare with; this trains one:\n  {sibling_command(cfg)}")
    for label, sample in (samples or {}).items():
        parts += [Text(f"\n{label} writes:", style="bold"), Text(sample)]
    console().print(*parts, Text(f"\nruns: {' '.join(map(str, folders))}"), sep="\n")
    if result:
        written = write_comparison(result, folders[0], figures=cfg.compare.report)
        console().print(f"comparison: {written[-1]}")
        if tracker and cfg.compare.report:
            tracker.attach(comparison_rows(result), *written[-2:])


def compare_sweep(runs_dir: Path, folders: list[Path], missing: list[str], wandb: WandbConfig) -> None:
    """One comparison over all runs of a sweep that ended: printed, in a folder beside them, on a W&B run of its own."""
    runs = [run for run in map(load_run, folders) if run.status in ("finished", "diverged")]
    runs.sort(key=lambda run: run.config["against"] is not None)  # baselines first
    if len(runs) < 2:
        return ALONE.say("fewer than two runs of the sweep have ended: nothing to compare")
    result = compare(runs) | {"command": typed_command()}
    result["notes"] += [f"a job of the sweep did not finish: {line}" for line in missing]
    console().print(shown(result))
    place = runs_dir / ("sweep-" + re.sub(r"[^\w.=-]+", "_", wandb.group.removeprefix("sweep-")))
    *_, png, html = write_comparison(result, place)
    console().print(f"comparison: {html}")
    page = {"project": wandb.project, "group": wandb.group, "name": place.name, "mode": wandb_mode(wandb.mode)}
    verdicts = {f"{c['candidate']} minus {c['baseline']}": c["verdict"] for c in result["comparisons"]}
    log_comparison_run(place, **page, table=comparison_rows(result), png=png, html=html, summary=verdicts)


main = command(train, compare_sweep)

if __name__ == "__main__":
    main()
