"""key=value options for the scripts, typed by a dataclass and refused with near names, as train.py does it.

A field that is a list takes the words without a key.

The standard library alone: the kernel scripts run where nothing but PyTorch and Triton is installed.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import TypeVar, get_args, get_origin, get_type_hints

from errors import UserError, near

T = TypeVar("T")


def run_script(main: Callable[[T], None], schema: type[T], usage: str) -> None:
    """Calls main with the command line's options; prints `usage` for --help, and a UserError without a traceback."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        return
    with _explained():
        main(parse(schema, sys.argv[1:]))


def run_as_train(main: Callable[[T], None], usage: str) -> None:
    """Calls main with the configuration that train.py would have with these words; the rest as `run_script`."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        return
    from configs.cli import check_overrides
    from configs.twin import composed

    with _explained():
        if words := [word for word in sys.argv[1:] if word.startswith("-")]:
            raise UserError(f"cannot read {words[0]!r}; options are written key=value, like data=text data.path=FILE")
        check_overrides(sys.argv[1:])
        main(composed(*sys.argv[1:]))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    except OSError as e:
        print(f"error: {e.filename or 'a file'}: {e.strerror}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def parse(schema: type[T], args: list[str]) -> T:
    """`schema` filled from args, each KEY=VALUE or, for the field that is a list, a word; paths may hold a = too.

    UserError for an unknown key, a wrong type, a missing value.
    """
    types = get_type_hints(schema)
    names = [name for name, kind in types.items() if get_origin(kind) is not list]
    words = next((name for name in types if name not in names), None)
    given = {words: []} if words else {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if words and key not in names and (not equals or "/" in arg or os.path.exists(arg)):
            given[words].append(arg)
            continue
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
        wanted = {int: "an integer", float: "a number"}.get(kind) or f"one of {', '.join(kind)}"
        raise UserError(f"{key}={value} must be {wanted}") from None
