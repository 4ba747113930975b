"""key=value options for the scripts, typed by a dataclass and refused with near names, as train.py does it.

The standard library alone: the kernel scripts run where nothing but PyTorch and Triton is installed.
"""

import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from typing import TypeVar, get_args, get_type_hints

from errors import UserError, near

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
    names, types = [f.name for f in fields(schema)], get_type_hints(schema)
    given = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals:
            raise UserError(f"cannot read {arg!r}; options are written key=value: {', '.join(names)}")
        if key not in names:
            raise UserError(f"there is no option {key!r}; {near(key, names)}")
        given[key] = convert(key, value, types[key])
    missing = [f.name for f in fields(schema) if f.default is MISSING and f.name not in given]
    if missing:
        raise UserError(f"{'= and '.join(missing)}= must be given; --help shows how")
    return schema(**given)


def convert(key: str, value: str, kind: type):
    """`value` as a str, an int or a member of an enum; "null" where `kind` allows None."""
    optional = type(None) in get_args(kind)
    if optional and value in ("null", "none"):
        return None
    kind = get_args(kind)[0] if optional else kind
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind) if issubclass(kind, Enum) else f"{'an integer' if kind is int else kind.__name__}"
        raise UserError(f"{key}={value} must be {'one of ' if issubclass(kind, Enum) else ''}{choices}") from None
