"""The command line: Hydra, near names for typing errors, mistakes without a traceback, and the jobs of a sweep."""

import errno
import functools
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
from hydra._internal.utils import get_args
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config, register
from configs.sweep import Record, Sweep
from configs.twin import to_config, with_twin
from errors import UserError, near
from training.config import WandbConfig

FOLDER = Path(__file__).parent
LAUNCHERS = {  # and what to install for them
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
KILLED = {"TerminatedWorkerError", "UncompletedJobError"}  # what joblib and submitit say of a process that was
UNWRITABLE = {errno.EACCES, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS}
SPELT_OUT = {ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP}
SET_BY_GROUP = {"model.norm.kind": "norm", "model.placement": "placement"}


def options(group: str, folders: list[Path]) -> list[str]:
    """Names of a group's options; of the groups themselves for ""."""
    if not group:
        return sorted({f.parent.name for folder in folders for f in folder.glob("*/*.yaml")})
    return sorted({f.stem for folder in folders for f in (folder / group).glob("*.yaml")})


def schema_keys(node: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections included."""
    keys = []
    for f in fields(node):
        keys.append(prefix + f.name)
        if is_dataclass(f.type):
            keys += schema_keys(f.type, f"{prefix}{f.name}.")
    return keys


def check_overrides(args: list[str]) -> None:
    """Refuses options and keys that do not exist, with the near names. Hydra lets `+optim.lrr=1` through."""
    for arg in args:
        key, equals, _ = arg.lstrip("-").partition("=")
        if arg.startswith("-") and equals and key in [*schema_keys(), *options("", [FOLDER])]:
            raise UserError(f"{arg} is written without dashes: {arg.lstrip('-')}")
    parsed = get_args(args)
    if parsed.shell_completion:
        return
    folders = [FOLDER, *([Path(parsed.config_dir)] if parsed.config_dir else [])]
    for override in parse_overrides(parsed.overrides):
        if override.key_or_group == "hydra/launcher":
            check_launcher(override.value(), folders)
        if override.key_or_group.split("/")[0].split(".")[0] == "hydra":
            continue
        sweep = override.is_sweep_override()
        if sweep and not parsed.multirun:
            raise UserError(f"{override.input_line} holds several values; python train.py -m ... runs them all")
        if sweep and override.key_or_group == "runs_dir":
            raise UserError(f"{override.input_line} holds several values; all runs of a sweep are in one folder")
        if not sweep:
            values = [override.value()]
        elif override.value_type in SPELT_OUT:
            values = override.sweep_string_iterator()
        else:
            continue  # glob() and interval() are for Hydra and its sweepers to spell out
        for value in values:
            check_choice(override.key_or_group, value, folders)


def check_launcher(name: str, folders: list[Path]) -> None:
    Plugins.instance()  # finds those installed
    known = {stored.removesuffix(".yaml") for stored in ConfigStore.instance().list("hydra/launcher")}
    known |= set(options("hydra/launcher", folders))
    if name in known:
        return
    if name in LAUNCHERS:
        raise UserError(f"hydra/launcher={name} is not installed; pip install {LAUNCHERS[name]}")
    raise UserError(f"hydra/launcher={name} is not a launcher; {near(str(name), sorted(known | LAUNCHERS.keys()))}")


def parse_overrides(lines: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(lines)
    except OverrideParseException as e:
        if "=" not in e.override:
            raise UserError(f"cannot read {e.override!r}; options are written key=value, like norm=rmsnorm") from e
        key, _, value = e.override.partition("=")
        raise UserError(
            f"cannot read {e.override!r}; a value with blanks or special characters needs quotes of its own: "
            f"\"{key}='{value}'\""
        ) from e


def check_choice(key: str, value, folders: list[Path]) -> None:
    """Refuses an option or a key that does not exist, and a value that the schema's type cannot take."""
    keys, groups = schema_keys(), options("", folders)
    if key in groups:
        names = options(key, folders)
        if (value is None and key != "experiment") or (isinstance(value, str) and value not in names):
            raise UserError(f"{key}={value} is not an option of {key}; {near(str(value), names)}")
    elif key in SET_BY_GROUP:
        raise UserError(f"{key} is what the option {SET_BY_GROUP[key]}= chooses; write {SET_BY_GROUP[key]}={value}")
    elif key not in keys:
        raise UserError(f"there is no key {key!r}; {near(key, keys + groups)}")
    else:
        check_value(key, value)


def check_value(key: str, value) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value} must be a finite number")
    try:
        OmegaConf.update(OmegaConf.structured(Config), key, value)
    except OmegaConfBaseException as e:
        raise UserError(f"{key}={value} does not fit: {str(e).splitlines()[0]}") from e


def reason(error: Exception) -> tuple[str, int] | None:
    """What the user can mend, in words, and the exit status; None where the fault is ours."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, HydraException):
        return "\n".join(map(str, filter(None, (error, error.__cause__)))), 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        what = error.filename or "the run"
        return f"no space left for {what}; make room, then resume=true: what was saved is whole", 1
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        return f"out of memory; a larger train.accumulate needs less ({str(error).splitlines()[0]})", 1
    if type(error).__module__.startswith("torch.distributed") or "gloo" in str(error):
        what = str(error).splitlines()[0]
        detail = "" if re.search("by peer|GLHF", what) else f" ({what})"  # that it ended is all there is to say
        return f"lost the connection to another process, which says why if it can{detail}", 1
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return f"{error.filename}: {error.strerror}; choose a place that can be written, for example with runs_dir=", 1
    return None


def explain(error: Exception) -> int | None:
    """Prints what is the user's to mend in one line and returns the exit status; None where the fault is ours."""
    if not (known := reason(error)):
        return None
    message, status = known
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"error: {message}", file=sys.stderr)
    elif not (isinstance(error, UserError) or getattr(error, "shared", False)):  # else the first process says it
        print(f"error: rank {rank}: {message}", file=sys.stderr)
    return status


def run_job(task: Callable[[list[Config]], float], sweep: Sweep, cfg: DictConfig) -> float:
    """One job of a sweep, in whatever process: how it ends is written down, and lets the others go on."""
    if sweep.stopped:
        return math.nan
    sweep.settle_worker()
    hydra_config, configs = HydraConfig.get(), []
    record = Record(hydra_config.job.num, list(hydra_config.overrides.task))
    try:
        with sweep.watched():
            configs = with_twin(to_config(cfg))
            for run in configs:  # the same sweep once more skips what is finished and resumes the rest
                run.resume = not run.overwrite
                run.wandb.group = sweep.wandb.group
                run.compare.report = False  # one comparison comes at the end
            loss = task(configs)
        record.status = "finished"
        return loss
    except (KeyboardInterrupt, SystemExit):
        record.status = "interrupted"
        if os.getpid() == sweep.pid:
            raise
    except Exception as error:
        if explain(error) is None:
            traceback.print_exc()
        message, status = reason(error) or (f"{type(error).__name__}: {error}", 1)
        record.status = "diverged" if type(error).__name__ == "Diverged" else "failed"
        record.message = message.partition("\n")[0]
        if status == UserError.exit_code:
            configs = []  # it was refused, and what stands in its folder is another's
    finally:
        folders = [Path(run.runs_dir) / run.name for run in configs]
        record.folders = [str(folder) for folder in folders if (folder / "config.yaml").exists()]
        with suppress(OSError):  # a full disk: the job then counts as not run, and the others go on
            sweep.write(record)
    return math.nan


AfterSweep = Callable[[Path, list[Path], list[str], WandbConfig], None]


def finish(sweep: Sweep, after_sweep: AfterSweep | None) -> int:
    """Hands the runs of all jobs to `after_sweep`, then says which jobs failed and why; returns the exit status."""
    records = sweep.records()
    folders = list(dict.fromkeys(Path(folder) for record in records for folder in record.folders))
    shared = set.intersection(*(set(record.overrides) for record in records)) if records else set()
    failed = {record.line(shared): record for record in records if record.status != "finished"}
    missing = [line for line, record in failed.items() if record.status != "diverged"]
    shutil.rmtree(sweep.folder, ignore_errors=True)  # it is all read
    status = 0
    try:
        if after_sweep and folders:
            after_sweep(sweep.runs_dir, folders, missing, sweep.wandb)
    except Exception as error:
        if explain(error) is None:
            traceback.print_exc()
        status = 1
    if failed:
        print(f"{len(failed)} jobs failed:", *failed, sep="\n  ", file=sys.stderr)
        status = 1
    return status


def run_sweep(task: Callable[[list[Config]], float], after_sweep: AfterSweep | None) -> int:
    """All jobs, by whatever launcher, and what comes after them; returns the exit status."""
    sweep = Sweep.launching = Sweep(list(sys.argv))
    job = functools.wraps(task)(functools.partial(run_job, task, sweep))
    path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    try:
        # with its full errors Hydra raises them, instead of printing a traceback and ending the process
        with sweep.listening(), env_override({"HYDRA_FULL_ERROR": "1", "PYTHONPATH": path}):
            start_hydra(job)
        if not sweep.stopped:
            return finish(sweep, after_sweep)
    except (KeyboardInterrupt, SystemExit) as stop:
        if not sweep.stopped and isinstance(stop, SystemExit):
            raise
    except Exception as error:
        if sweep.stopped:
            pass  # its workers were ended
        elif type(error).__name__ in KILLED:
            print(f"error: a job's process was killed, which ends the sweep; to go on: {sweep.again}", file=sys.stderr)
            return 1
        elif "srun" in str(error):  # submitit
            print(f"error: hydra/launcher: {str(error).splitlines()[0]}", file=sys.stderr)
            return 1
        elif (status := explain(error)) is not None:
            return status
        else:
            raise
    finally:
        Sweep.launching = None
    print(f"interrupted; to go on: {sweep.again}", file=sys.stderr)
    return 130


def start_hydra(job: Callable[[DictConfig], float]) -> None:
    hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="train")(job)()


def command(task: Callable[[list[Config]], float], after_sweep: AfterSweep | None = None) -> Callable[[], None]:
    """Turns `task(configs)` into a program's entry point. Exits 2 after a user's mistake, 130 after Ctrl-C.

    In a sweep a job that fails says so and the others go on; the sweep then ends with exit status 1. Once all have
    ended, `after_sweep(runs_dir, folders, missing, wandb)` gets the runs of all jobs, a twin after its run, and a line
    for each job that neither finished nor diverged; wandb.group is the sweep's.
    """

    @functools.wraps(task)
    def job(cfg: DictConfig) -> float:
        try:
            return task(with_twin(to_config(cfg)))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            status = explain(error)
            if status is None:
                raise
            sys.exit(status)

    def entry() -> None:
        register()
        multirun = {"-m", "--multirun"} & set(sys.argv)
        if multirun:  # argparse takes options on one side of a flag alone
            sys.argv[1:] = ["-m", *(arg for arg in sys.argv[1:] if arg not in ("-m", "--multirun"))]
        try:
            if multirun and int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise UserError("torchrun starts the processes of one run, and -m several runs; call torchrun for each")
            check_overrides(sys.argv[1:])
        except UserError as error:
            sys.exit(explain(error))
        if not multirun:
            start_hydra(job)
        elif status := run_sweep(task, after_sweep):
            sys.exit(status)

    return entry
