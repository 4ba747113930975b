"""key=value options for the scripts, typed by a dataclass and refused with near names, as train.py does it."""

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.cli import near
from errors import UserError

T = TypeVar("T")


def run_script(main: Callable[[T], None], schema: type[T], usage: str) -> None:
    """Calls main with the command line's options; prints `usage` for --help, and a UserError without a traceback."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        return
    try:
        main(parse(schema, sys.argv[1:]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.exit_code)


def parse(schema: type[T], args: list[str]) -> T:
    """`schema` filled from args, each KEY=VALUE; UserError for an unknown key, a wrong type, a missing value."""
    names = [f.name for f in fields(schema)]
    pairs = [arg.partition("=") for arg in args]
    for key, equals, _ in pairs:
        if not equals:
            raise UserError(f"cannot read {key!r}; options are written key=value: {', '.join(names)}")
        if key not in names:
            raise UserError(f"there is no option {key!r}; {near(key, names)}")
    given = {key for key, _, _ in pairs}
    missing = [f.name for f in fields(schema) if f.default == MISSING and f.name not in given]
    if missing:
        raise UserError(f"{'= and '.join(missing)}= must be given; --help shows how")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), {k: v for k, _, v in pairs}))
    except OmegaConfBaseException as e:
        raise UserError(str(e).splitlines()[0]) from e
