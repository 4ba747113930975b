"""Sweeps: what their jobs leave, what the launching process makes of it, and what a kill or Ctrl-C costs."""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins

from configs.cli import command
from configs.sweep import Record, Sweep
from errors import UserError
from tests.conftest import ROOT

PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}


def needing(launcher: str, *values) -> object:
    plugin = PLUGINS[launcher]
    missing = importlib.util.find_spec("hydra_plugins") is None or not importlib.util.find_spec(
        f"hydra_plugins.{plugin}"
    )
    reason = f"pip install {plugin.replace('_', '-')}"
    return pytest.param(launcher, *values, marks=[pytest.mark.skipif(missing, reason=reason)])


# in this process, with a task that trains nothing


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys) -> Callable:
    """sweep(task, *words) -> exit status, what the hook was called with, stderr."""

    def here(task, *words: str, hook=None):
        calls = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *words])
        capsys.readouterr()
        try:
            command(task, hook or (lambda *args: calls.append(args)))()
            status = 0
        except SystemExit as e:
            status = e.code
        return status, calls, capsys.readouterr().err

    return here


def pretend(configs) -> float:
    """Leaves the folders of runs; those of seed 2 diverge, and those of seed 3 are refused."""
    cfg = configs[0]
    for run in configs:
        folder = Path(run.runs_dir) / run.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").touch()
    if cfg.seed == 2:
        raise Diverged("loss nan\nand more")
    if cfg.seed == 3:
        raise UserError("refused")
    if cfg.seed == 4:
        raise KeyError("ours")
    return cfg.seed / 2


class Diverged(UserError):
    exit_code = 1


def test_after_a_sweep_the_hook_gets_the_runs_of_all_jobs_in_their_order(sweep):
    status, [(runs_dir, folders, missing, wandb)], err = sweep(
        pretend, "norm=rmsnorm", "seed=5,2,3,4", "against=pre", "placement=post"
    )
    assert status == 1
    assert [f.name.split("-")[4] + f.name.split("-")[1] for f in folders] == [
        seed + placement for seed in ("s5", "s2", "s4") for placement in ("post", "pre")
    ]
    assert all(f.parent == runs_dir == Path("runs") for f in folders)
    assert wandb.group.startswith("sweep-")
    assert missing == ["seed=3: failed: refused", "seed=4: failed: KeyError: 'ours'"]
    lines = ["seed=2: diverged: loss nan", *missing]
    assert err.splitlines()[-4:] == ["3 jobs failed:", *(f"  {line}" for line in lines)]
    assert not list((runs_dir / ".sweep").glob(f"{wandb.group.removeprefix('sweep-')}*"))  # what was noted is read


def test_the_hook_is_not_called_without_a_run_and_its_own_mistakes_are_told(sweep):
    status, calls, err = sweep(pretend, "seed=3")
    assert (status, calls) == (1, [])
    assert err.splitlines()[-1] == "  job 0: failed: refused"

    def hook(*args):
        raise UserError("no comparison")

    status, _, err = sweep(pretend, "seed=1,2", hook=hook)
    assert status == 1
    assert "error: no comparison\n1 jobs failed:\n" in err


def test_the_users_own_group_and_the_losses_for_sweepers(sweep, monkeypatch):
    sweeper = Plugins.instance().class_name_to_class[f"{BasicSweeper.__module__}.BasicSweeper"]
    whole, losses, groups = sweeper.sweep, [], []

    def noted(self, arguments):
        (jobs,) = whole(self, arguments)
        losses.extend(job.return_value for job in jobs)

    def task(configs):
        groups.append(configs[0].wandb.group)
        return pretend(configs)

    monkeypatch.setattr(sweeper, "sweep", noted)
    status, [(*_, wandb)], _ = sweep(task, "seed=1,3,7", "wandb.group=mine")
    assert status == 1
    assert wandb.group == "mine"
    assert groups == ["mine"] * 3
    assert losses == [0.5, pytest.approx(float("nan"), nan_ok=True), 3.5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_a_job_and_ends_the_sweep_and_the_same_command_goes_on(sweep, number):
    ran = []

    def task(configs):
        ran.append(configs[0].seed)
        if ran == [1, 2]:
            if (
                number == signal.SIGINT
            ):  # threads that other tests left here, OpenMP's, would take it from the one that waits
                (waiting,) = [t for t in threading.enumerate() if t.name.endswith("(wait)")]
                signal.pthread_kill(waiting.ident, number)
            else:
                os.kill(os.getpid(), number)
            time.sleep(10)
            ran.append("slept")
        return pretend(configs)

    status, calls, err = sweep(task, "seed=1,2,5")
    assert (status, calls, ran) == (130, [], [1, 2])
    assert err.splitlines()[-1] == "interrupted; to go on: python train.py -m seed=1,2,5"
    assert "Traceback" not in err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    status, calls, _ = sweep(pretend, "seed=1,5")
    assert (status, len(calls)) == (0, 1)


def test_a_mistake_before_the_first_job_ends_without_a_traceback(sweep):
    for words in (["optim.lr=interval(0.1,0.2)"], ["runs_dir=/dev/null/runs"]):
        status, calls, err = sweep(pretend, *words)
        assert (status, calls) == (1, [])
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1


def test_records_of_an_earlier_call_do_not_count(tmp_path):
    first, second = (
        Sweep(["train.py", "-m", "seed=1,2"], runs_dir=tmp_path, jobs=[["seed=1"], ["seed=2"]]) for _ in range(2)
    )
    for job in (0, 1):
        first.write(Record(job, [f"seed={job + 1}"], "finished"))
    second.write(Record(1, ["seed=2"], "failed", message="why"))
    assert second.hash == first.hash
    assert [r.status for r in second.records()] == ["not run", "failed"]
    assert [r.status for r in first.records()] == ["finished", "finished"]
    assert json.loads((first.folder / "0.json").read_text())["status"] == "finished"


def test_the_same_sweep_has_the_same_folder_however_it_is_run():
    words = ["-m", "seed=1,2", "norm=rmsnorm"]
    how = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "overwrite=true"]
    assert Sweep(["train.py", *words]).hash == Sweep(["train.py", *how, *reversed(words)]).hash
    assert Sweep(["train.py", *words]).hash != Sweep(["train.py", "-m", "seed=1,2"]).hash


# in processes of their own

WAITING = """
import os, signal, sys, time
from pathlib import Path
from configs.cli import command
from training.stop import StopSignal

def wait(configs):
    runs, name = Path(configs[0].runs_dir), str(configs[0].seed)  # the test reads what is in the folder NAME
    if (runs / name / "done").exists():
        return print("skipped", name, file=sys.stderr)
    (runs / name).mkdir(parents=True, exist_ok=True)
    deaf = int(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    (runs / name / ".new").write_text(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')} {deaf}")
    (runs / name / ".new").replace(runs / name / "process")
    (runs / configs[0].name).mkdir(exist_ok=True)
    (runs / configs[0].name / "config.yaml").touch()
    with StopSignal() as stop:
        while not stop and not (runs / f"go{name}").exists():
            time.sleep(0.02)
    (runs / name / ("saved" if stop else "done")).touch()
    if stop:
        sys.exit(128 + stop.number)

main = command(wait, lambda *args: print("hook", file=sys.stderr))
if __name__ == "__main__":
    main()
"""


class Waiting:
    """A sweep over seeds whose jobs wait for a file, and end on a signal as training does."""

    def __init__(self, folder: Path, *words: str):
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.script = folder / "waiting.py"
        self.script.write_text(WAITING)
        self.words = ["-m", *words, f"runs_dir={self.runs}"]

    def start(self) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, str(self.script), *self.words], cwd=self.script.parent, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return self.process

    def let_go(self, *seeds: int) -> None:
        for seed in seeds:
            (self.runs / f"go{seed}").touch()

    def until(self, *names: str) -> None:
        """Waits for files in the runs' folder."""
        while not all((self.runs / name).exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err
        return self.process.returncode, err


@pytest.fixture
def waiting(tmp_path):
    """waiting(*words) -> a Waiting whose processes all end with the test."""
    made = []

    def here(*words: str) -> Waiting:
        made.append(Waiting(tmp_path, *words))
        return made[0]

    yield here
    made[0].let_go(1, 2, 3)
    if made[0].process.poll() is None:
        os.killpg(made[0].process.pid, signal.SIGKILL)
        made[0].process.communicate()


@pytest.mark.parametrize("launcher", [needing("joblib")])
def test_a_killed_worker_ends_the_sweep_and_the_next_call_does_the_rest(waiting, launcher):
    waiting = waiting(f"hydra/launcher={launcher}", "hydra.launcher.n_jobs=2", "seed=1,2,3")
    waiting.let_go(1)
    waiting.start()
    waiting.until("1/done", "2/process", "3/process")
    pid, threads, deaf = (waiting.runs / "2" / "process").read_text().split()
    assert int(threads) * 2 <= max(os.cpu_count(), 2)
    assert deaf == "1"  # Ctrl-C at a terminal does not reach it, whatever it is doing
    os.kill(int(pid), signal.SIGKILL)
    status, err = waiting.end()
    assert status == 1
    (line,) = err.splitlines()
    assert line.startswith("error: a job's process was killed")
    assert shlex.split(line.partition("to go on: ")[2]) == ["python", "waiting.py", *waiting.words]
    waiting.let_go(2, 3)
    waiting.start()
    status, err = waiting.end()
    assert status == 0, err
    assert sorted(err.splitlines()) == ["hook", "skipped 1"]
    assert (waiting.runs / "2" / "done").exists()


@pytest.mark.parametrize(("launcher", "running"), [needing("joblib", "12"), needing("submitit_local", "123")])
def test_ctrl_c_lets_every_job_save_and_the_next_call_does_the_rest(waiting, launcher, running):
    words = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    waiting = waiting(f"hydra/launcher={launcher}", *words, "seed=1,2,3")
    process = waiting.start()
    waiting.until(*(f"{seed}/process" for seed in running))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    status, err = waiting.end()
    assert status == 130
    assert "hook" not in err
    assert err.splitlines()[-1].startswith("interrupted; to go on: python waiting.py -m")
    assert sorted(f.parent.name for f in waiting.runs.glob("*/saved")) == sorted(running)
    assert len(list(waiting.runs.glob("?"))) == len(running)
    waiting.let_go(1, 2, 3)
    waiting.start()
    status, err = waiting.end()
    assert status == 0, err
    assert len(list(waiting.runs.glob("*/done"))) == 3


@pytest.mark.seconds(10)
@pytest.mark.parametrize("launcher", [needing("joblib"), needing("submitit_local")])
def test_training_in_other_processes(tmp_path, overrides, launcher, train_py):
    words = [o for o in overrides if not o.startswith(("name=", "against=", "train.steps="))]
    words = ["-m", "optim.beta1=0.9,1.5", *words, "train.steps=3", "against=seed"]
    command = [sys.executable, str(ROOT / "train.py"), f"hydra/launcher={launcher}", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "1 jobs failed:",
        "  optim.beta1=1.5: failed: optim.beta1=1.5 must lie in [0, 1)",
    ]
    assert "Traceback" not in done.stderr
    folders = [f.parent for f in tmp_path.glob("runs/*/summary.json")]
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
        typed = json.loads((folder / "environment.json").read_text())["command"]
        assert shlex.split(typed) == ["python", "train.py", "-m", f"hydra/launcher={launcher}", *words[1:]]
    again = train_py(*words)
    assert "finished before" in again.stderr
