"""A sweep: what its jobs tell each other, by files, for they may run in other processes or on other nodes.

runs/.sweep/HASH-CALL/NUMBER.json    what became of job NUMBER, written when it ends
runs/.sweep/HASH-CALL/stop           asks the jobs to save and stop
"""

import functools
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from files import write_json
from training.config import WandbConfig

# words that say how a sweep is run, not what it is
HOW = re.compile(r"hydra[/.]launcher|(resume|overwrite|force)=")


@dataclass
class Record:
    """What became of one job."""

    job: int
    overrides: list[str]
    status: str = "not run"
    """finished, diverged, failed, interrupted, or not run."""
    folders: list[str] = field(default_factory=list)
    """Its run's folder, then the twin's; only those that exist."""
    message: str | None = None
    """The first line of why it did not finish."""

    def line(self, shared: set[str]) -> str:
        """Which job it was, by the overrides that not all jobs share, and how it ended."""
        own = " ".join(override for override in self.overrides if override not in shared)
        return ": ".join(filter(None, [own or f"job {self.job}", self.status, self.message]))


@dataclass
class Sweep:
    """One call of a sweep; it travels to the jobs' processes with the function that they run."""

    argv: list[str]
    pid: int = field(default_factory=os.getpid)
    call: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Sets the records of this call apart from those of others."""
    runs_dir: Path | None = None
    wandb: WandbConfig | None = None
    jobs: list[list[str]] = field(default_factory=list)
    """Overrides of each job, where the sweeper is Hydra's own; another one decides as it goes."""

    launching: ClassVar["Sweep | None"] = None

    def start(self, config: DictConfig) -> None:
        """`config` is what all jobs share."""
        self.runs_dir = Path(config.runs_dir)
        wandb = OmegaConf.to_object(config.wandb)
        self.wandb = replace(wandb, group=wandb.group or f"sweep-{self.hash}")
        if config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            lines = [f"{k}={v}" for k, v in (config.hydra.sweeper.params or {}).items()]
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            overrides = parser.parse_overrides([*lines, *config.hydra.overrides.task])
            with suppress(HydraException):  # the sweeper says it itself
                (self.jobs,) = BasicSweeper.split_arguments(overrides, None)

    @functools.cached_property
    def hash(self) -> str:
        """Of what is swept: the same for the same sweep called again, by another launcher too."""
        words = sorted(word for word in self.argv[1:] if not HOW.match(word))
        return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]

    @property
    def folder(self) -> Path:
        return self.runs_dir / ".sweep" / f"{self.hash}-{self.call}"

    @property
    def again(self) -> str:
        """The command that resumes it."""
        words = [word for word in self.argv[1:] if word != "overwrite=true"]
        return shlex.join(["python", Path(self.argv[0]).name, *words])

    def write(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{record.job}.json", asdict(record))

    def records(self) -> list[Record]:
        """In the order of the jobs; a job that was not reached is not run."""
        records = {i: Record(i, overrides) for i, overrides in enumerate(self.jobs)}
        for path in self.folder.glob("[0-9]*.json"):
            record = Record(**json.loads(path.read_text(encoding="utf-8")))
            records[record.job] = record
        return [records[job] for job in sorted(records)]

    # stopping

    @property
    def stop(self) -> Path:
        return self.folder / "stop"

    @property
    def stopped(self) -> bool:
        return self.runs_dir is not None and self.stop.exists()

    def ask_to_stop(self) -> None:
        """The first time lets the jobs save; the second time ends at once what the launching process is doing."""
        if self.runs_dir is None or self.stopped:
            raise KeyboardInterrupt
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stop.touch()
        os.write(2, b"\nthe sweep ends when its jobs have saved; once more ends it at once\n")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In the launching process: Ctrl-C and SIGTERM ask the jobs to stop.

        A terminal sends Ctrl-C to the jobs' processes too, and one that is starting, or idle, would die of it and take
        its launcher along. So SIGINT is blocked, which they inherit, and a thread waits for it.
        """
        if not hasattr(signal, "sigwait"):  # Windows
            yield
            return
        done = threading.Event()

        def wait() -> None:
            while signal.sigwait({signal.SIGINT}) and not done.is_set():
                if self.runs_dir is None or self.stopped:
                    terminate_main_thread()
                else:
                    self.ask_to_stop()

        resource_tracker.ensure_running()  # joblib needs it, and its start unblocks SIGINT again: so it starts before
        before = signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop())
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            signal.pthread_kill(thread.ident, signal.SIGINT)
            thread.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In a job: SIGTERM interrupts it, and comes by itself when the sweep is asked to stop."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                if self.stopped:
                    terminate_main_thread()
                    return

        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            signal.signal(signal.SIGTERM, before)

    def settle_worker(self) -> None:
        """In a process that a launcher started: the command is the sweep's, and lines on the terminal stay whole."""
        if os.getpid() == self.pid:
            return
        sys.argv = list(self.argv)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
            stream.isatty = lambda: False  # progress bars of several jobs would draw over each other


def terminate_main_thread() -> None:
    """SIGTERM, for its handler in this process, whatever the main thread is waiting for."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    else:
        signal.raise_signal(signal.SIGTERM)


class SweepStarts(Callback):
    """Hydra's way to tell the launching process what configuration the jobs share; named in train.yaml."""

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        if Sweep.launching:
            Sweep.launching.start(config)
