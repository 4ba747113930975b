"""The one exception that stands for a user's mistake; the command line prints it without a traceback."""


class UserError(Exception):
    """Says what was wrong, what was got, and how to mend it. `exit_code` is what the process ends with."""

    exit_code = 2
