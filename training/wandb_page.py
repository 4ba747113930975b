"""A run's page on W&B: started without a prompt or a stall, and never the end of a run. Only `wandb` knows more."""

import contextlib
import hashlib
import netrc
import os
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

from errors import UserError
from training.config import WandbMode

INIT_TIMEOUT_S = 4
"""What an online start may wait; starting again offline costs 1 to 3 seconds more."""
ATTACH_TIMEOUT_S = 3
FINISH_TIMEOUT_S = 7
"""What a run's end may wait for its upload; two twins end one after the other."""
PLOTTED = ("train/*", "val/*", "time/*", "compare/*", "residual/*", "gain/*")
LOWEST = ("val/loss", "val/bpb")
"""Metrics of which a summary holds the lowest value too, as NAME_min beside the final NAME."""


class WandbPage:
    """A run's page on W&B, or none. W&B's first error is said and ends the logging, never the training."""

    def __init__(self, wandb_run=None):
        self.wandb_run, self.failed = wandb_run, False

    def act(self, what: Callable) -> None:
        """Calls `what` with the W&B run, if there is one."""
        if self.wandb_run is None:
            return
        try:
            what(self.wandb_run)
        except Exception as e:  # whatever it is, training goes on
            if not self.failed:
                warn(f"W&B failed, and the run goes on without it ({first_line(e)})")
            self.failed = True
            if isinstance(e, ConnectionError) or type(e).__name__ == "MailboxClosedError":
                self.wandb_run = None
                teardown()  # W&B's own process has died: else Python's exit would show a traceback of that

    def log(self, record: dict, **about) -> None:
        if not self.failed:
            self.act(lambda run: run.log(record, **about))

    def attach(self, table: tuple[list[str], list[list]], png: Path, html: Path) -> None:
        """Shows a comparison: a table (columns, rows), a picture and a page; after ATTACH_TIMEOUT_S without the table.

        Measured: to log a table online, W&B asks its server, and waits 19 s for one that has gone.
        """

        def log(run) -> None:
            import wandb

            report = wandb.Html(html.read_text(encoding="utf-8"), inject=False)
            run.log({"comparison/curves": wandb.Image(str(png)), "comparison/report": report}, commit=False)
            columns, rows = table
            of_table = {"comparison/table": wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}
            with contextlib.suppress(TimeoutError):  # `close` says what could not be sent
                within(ATTACH_TIMEOUT_S, lambda: run.log(of_table, commit=False))

        self.act(log)

    def close(self, summary: dict, exit_code: int = 0) -> None:
        """Ends the page with a summary, after at most FINISH_TIMEOUT_S or WANDB_FINISH_TIMEOUT seconds."""

        def end(run) -> None:
            run.log({}, commit=True)  # else the last row, written at the end, would replace the summary
            run.summary.update(summary)

        def finish(run) -> None:
            if not delivered(run, exit_code):
                warn(
                    "W&B got only part of this run: what was logged is kept locally, and "
                    f"`wandb sync {run.sync_dir}` sends it later"
                )

        self.act(end)
        self.act(finish)
        self.wandb_run = None


def within(seconds: float, what: Callable) -> None:
    """Calls `what` in a thread of its own; TimeoutError after so many seconds, while it goes on."""
    outcome = Future()

    def call() -> None:
        try:
            outcome.set_result(what())
        except Exception as e:
            outcome.set_exception(e)

    threading.Thread(target=call, daemon=True).start()
    outcome.result(seconds)


def delivered(run, exit_code: int) -> bool:
    """Ends a W&B run; whether its server, if it has one, took all of it. W&B's own log has it in any case."""
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        return False
    return not any("Fatal error" in notice for notice in NOTICES) or run.offline


def new_run_id() -> str:
    return uuid.uuid4().hex[:8]


def has_wandb_key() -> bool:
    """Whether `wandb login` was done, or an environment variable names a key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_mode(configured: WandbMode) -> WandbMode:
    """WANDB_MODE, else the configuration; online needs a key, since W&B would stop and ask for one."""
    mode = WandbMode(os.environ["WANDB_MODE"]) if os.environ.get("WANDB_MODE") in set(WandbMode) else configured
    if mode in (WandbMode.auto, WandbMode.online):
        if mode == WandbMode.online and not has_wandb_key():
            print(
                "wandb.mode=online finds no key, so this run is logged offline; `wandb login` sets one up",
                file=sys.stderr,
            )
        return WandbMode.online if has_wandb_key() else WandbMode.offline
    return mode


NOTICES: list[str] = []
"""What W&B would have printed since its last start."""


def warn(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def first_line(e: Exception) -> str:
    return (str(e) or type(e).__name__).splitlines()[0]


def teardown() -> None:
    """Ends W&B's process and whatever runs it has; the next run starts another."""
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # the latter is how it tells that the process had crashed
        wandb.teardown()


def start_wandb(
    folder: Path, *, config: dict, name: str, group: str | None, tags: list[str], mode: WandbMode, run_id: str
):
    """A W&B run in FOLDER/wandb with its axes and summaries, or None; see `open_wandb`."""
    about = {"config": config, "name": name, "group": group, "tags": tags, "run_id": run_id}
    run = open_wandb(folder, mode, project=config["wandb"]["project"], **about)
    WandbPage(run).act(define_metrics)
    return run


def define_metrics(run) -> None:
    """Plots everything over `step`, with `tokens` to choose, and keeps the lowest losses in the summary."""
    for axis in ("step", "tokens"):
        run.define_metric(axis)
    for names in PLOTTED:
        run.define_metric(names, step_metric="step")
    for name in LOWEST:
        run.define_metric(name, step_metric="step", summary="min")


def open_wandb(folder: Path, mode: WandbMode, *, project: str, run_id: str, **about):
    """A W&B run in FOLDER/wandb, or None where it is disabled or does not start; never prompts.

    Online falls back to offline within 8 seconds and with one line of warning. UserError where W&B refuses a name.
    """
    if mode == WandbMode.disabled:
        return None
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a server that hangs would hold up the process's end
    import wandb

    if mode != WandbMode.offline:
        try:
            return init_wandb("online", project=project, dir=str(folder), id=run_id, **about)
        except Exception as e:
            warn(f"W&B is out of reach, so this run is logged offline; `wandb sync` sends it later ({first_line(e)})")
        if wandb.setup().most_recent_active_run is None:
            teardown()  # else the id would count as in use
        else:
            run_id = new_run_id()
    try:
        return init_wandb("offline", project=project, dir=str(folder), id=run_id, **about)
    except wandb.errors.UsageError as e:
        raise UserError(f"W&B refuses this run: {first_line(e)}") from e
    except Exception as e:
        warn(f"W&B does not start, so this run has metrics.jsonl alone ({first_line(e)})")
        return None


def init_wandb(mode: str, *, project: str, tags: list[str], **about):
    """wandb.init, with what all our runs share; W&B prints nothing, and NOTICES gets its warnings."""
    import wandb

    settings = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_TIMEOUT_S)),
        finish_timeout_raises=True,
        console="off",
        silent=True,
    )
    wandb.setup(wandb.Settings(silent=True))
    NOTICES.clear()
    wandb.termsetup(settings, SimpleNamespace(info=len, warning=NOTICES.append, error=NOTICES.append))
    return wandb.init(
        mode=mode,
        project=os.environ.get("WANDB_PROJECT") or project,
        tags=tags + [t for t in os.environ.get("WANDB_TAGS", "").split(",") if t],
        resume="allow",
        reinit="create_new",
        settings=settings,
        **about,
    )


def log_comparison_run(
    folder: Path,
    *,
    project: str,
    group: str,
    name: str,
    mode: WandbMode,
    table: tuple[list[str], list[list]],
    png: Path,
    html: Path,
    summary: dict,
) -> None:
    """A run of its own for a sweep's comparison, in FOLDER/wandb; the same one each time for the same group."""
    run_id = hashlib.sha256(f"comparison {folder.resolve().parent} {group}".encode()).hexdigest()[:16]
    about = {"name": name, "group": group, "run_id": run_id, "job_type": "comparison", "tags": []}
    page = WandbPage(open_wandb(folder, mode, project=project, **about))
    page.attach(table, png, html)
    page.close(summary)
