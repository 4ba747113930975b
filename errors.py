"""The one exception that stands for a user's mistake; the command line prints it without a traceback."""

import difflib


class UserError(Exception):
    """Says what was wrong, what was got, and how to mend it. `exit_code` is what the process ends with."""

    exit_code = 2


def near(name: str, names: list[str]) -> str:
    """The names most like `name`, as the end of a sentence."""
    names = list(dict.fromkeys(names))  # a key may be a group as well
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    close += [n for n in names if n.split(".")[-1] == name.split(".")[-1] and n not in close]
    return f"near names: {', '.join(close)}" if close else f"there are: {', '.join(sorted(names))}"


# Options of versions before, refused by name; docs/log.md of 2026-12 says why each went.
GONE = (
    "compile_mode",
    "data.document_mask",
    "data.vocab_size",
    "dist.gather",
    "dist.reshard",
    "dist.shard",
    "train.on_spike",
    "train.spike_sigma",
)
