"""The command line: Hydra, near names for typing errors and mistakes without a traceback."""

import errno
import functools
import hashlib
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import Config, register
from configs.twin import to_config, with_twin
from errors import UserError, near

FOLDER = Path(__file__).parent
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
        if override.key_or_group.split("/")[0].split(".")[0] == "hydra":
            continue
        sweep = override.is_sweep_override()
        if sweep and not parsed.multirun:
            raise UserError(
                f"{override.input_line} holds several values; python train.py -m ... runs one after the other"
            )
        if not sweep:
            values = [override.value()]
        elif override.value_type in SPELT_OUT:
            values = override.sweep_string_iterator()
        else:
            continue  # glob() and interval() are for Hydra and its sweepers to spell out
        for value in values:
            check_choice(override.key_or_group, value, folders)


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


def sweep_group() -> str:
    """One W&B group for all jobs of a sweep, and for the same sweep called again."""
    return f"sweep-{hashlib.sha256(' '.join(sorted(sys.argv[1:])).encode()).hexdigest()[:8]}"


def explain(error: Exception) -> int | None:
    """Prints what is the user's to mend in one line and returns the exit status; None where the fault is ours."""
    if isinstance(error, UserError):
        message, status = str(error), error.exit_code
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        message, status = (
            f"no space left for {error.filename or 'the run'}; make room, then resume=true: what was saved is whole",
            1,
        )
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
        message, status = f"out of memory; a larger train.accumulate needs less ({str(error).splitlines()[0]})", 1
    elif isinstance(error, OSError) and error.errno in UNWRITABLE:
        message, status = (
            f"{error.filename}: {error.strerror}; choose a place that can be written, for example with runs_dir=",
            1,
        )
    else:
        return None
    print(f"error: {message}", file=sys.stderr)
    return status


def command(task: Callable[[list[Config]], float]) -> Callable[[], None]:
    """Turns `task(configs)` into a program's entry point. Exits 2 after a user's mistake, 130 after Ctrl-C.

    In a sweep a job that fails says so and the next one goes on; the sweep then ends with exit status 1.
    """
    failures: list[str] = []

    @functools.wraps(task)
    def job(cfg: DictConfig) -> float:
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            configs = with_twin(to_config(cfg))
            for run in configs if sweep else []:  # the same sweep once more skips what is finished and resumes the rest
                run.resume = not run.overwrite
                run.wandb.group = run.wandb.group or sweep_group()
            return task(configs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            status = explain(error)
            if not sweep and status is None:
                raise
            if not sweep:
                sys.exit(status)
            if status is None:
                traceback.print_exc()
            failures.append(" ".join(HydraConfig.get().overrides.task))
            return float("nan")

    def entry() -> None:
        register()
        if {"-m", "--multirun"} & set(sys.argv):  # argparse takes options on one side of a flag alone
            sys.argv[1:] = ["-m", *(arg for arg in sys.argv[1:] if arg not in ("-m", "--multirun"))]
        try:
            check_overrides(sys.argv[1:])
        except UserError as error:
            sys.exit(explain(error))
        hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="train")(job)()
        if failures:
            print(f"{len(failures)} jobs failed:", *failures, sep="\n  ", file=sys.stderr)
            sys.exit(1)

    return entry
