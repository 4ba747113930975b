"""Text to token files: in parallel, going on where a kill left off, whole or not there at all.

Each part of a corpus becomes one file beside a note of what is in it, in a hidden folder that gets its name when all
are there. What is made does not depend on how many processes made it, or how often they were killed.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.config import FROM_CORPUS, DataConfig, Tokenizer
from data.shards import ends_sha256
from data.sources import Corpus, Part, digest, identity, load_corpus, split_rule
from data.tokenizers import (
    build_encoding,
    encode,
    encoding_from_record,
    encoding_record,
    end_of_text,
    token_bytes,
    token_dtype,
)
from errors import UserError
from files import write_text

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None

if TYPE_CHECKING:
    from tiktoken import Encoding

FORMAT = 2
RECORD_NAME = "tokens.json"
LEARNT_CHARACTERS = 2**30
"""Characters of the training split that tokenizer=bpe learns from, at most: the first ones."""
COUNTS = ("tokens", "characters", "bytes", "documents")
stopping = None
"""In a process that tokenises, what the first one sets when it is to leave off."""


def cache_key(cfg: DataConfig, known: list) -> str:
    """Names the token folder of what is configured, whose text has the identity `known`."""
    tokenizer = [str(cfg.tokenizer), cfg.vocab_size if cfg.tokenizer == Tokenizer.bpe else None]
    return digest([FORMAT, *known, *tokenizer])[:16]


def prepare(cfg: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Makes the token folder `folder`; raises UserError where text, tokenizer or room for them cannot be had."""
    try:
        with locked(folder.with_name(f".{folder.name}.lock"), say):
            if not folder.is_dir():  # another process has made it meanwhile
                fill(cfg, folder, say)
    except OSError as error:
        raise UserError(
            f"cannot write token files to {cfg.cache_dir}: {error.strerror or error}; mend that, or choose another "
            "folder with data.cache_dir=FOLDER; the same command goes on with what is there"
        ) from error


def fill(cfg: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    began, work = time.perf_counter(), folder.with_name(f".{folder.name}.part")
    work.mkdir(parents=True, exist_ok=True)
    for half in work.glob(".*"):
        half.unlink()
    corpus = load_corpus(cfg, work)
    jobs = {work / f"{split}_{i:03d}.bin": part for split in corpus.parts for i, part in enumerate(corpus.parts[split])}
    keep_if_same(work, [corpus.revision, len(jobs)])
    encoding = settled_encoding(cfg, corpus, work / "tokenizer.json")
    left = {path: part for path, part in jobs.items() if not read_note(path)}
    if len(left) < len(jobs):
        say(f"going on: {len(jobs) - len(left)} of {len(jobs)} token files of {corpus.name} are there")
    tokenise(left, encoding, corpus.separated, cfg.num_proc)
    known = identity(cfg)
    if cache_key(cfg, known) != folder.name:
        shutil.rmtree(work)
        raise UserError(f"{corpus.name} changed while it was read; start again when nothing writes to it")
    record = describe(cfg, corpus, known, encoding, [read_note(path) for path in jobs])
    if empty := [split for split, n in record["tokens"].items() if n == 0]:
        shutil.rmtree(work)
        raise UserError(
            f"{corpus.name} holds no text for the {' and the '.join(empty)} split ({record['split_rule']}); give more "
            f"documents, or raise data.val_fraction={cfg.val_fraction}"
        )
    write_text(work / RECORD_NAME, json.dumps(record))
    os.rename(work, folder)
    for path in folder.iterdir():
        if work / path.name not in jobs and path.name != RECORD_NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    size, seconds = count_text(sum(record["tokens"].values())), time.perf_counter() - began
    say(f"prepared {size} tokens ({encoding.name}) from {corpus.name} in {seconds:.1f} s -> {folder}")


def settled_encoding(cfg: DataConfig, corpus: Corpus, kept: Path) -> "Encoding":
    """The tokenizer; one that is made from the text is made once, and kept."""
    if cfg.tokenizer not in FROM_CORPUS:
        return build_encoding(cfg.tokenizer)
    with contextlib.suppress(OSError, ValueError, KeyError, UserError):
        return encoding_from_record(json.loads(kept.read_text(encoding="utf-8")))
    splits = ["train"] if cfg.tokenizer == Tokenizer.bpe else list(corpus.parts)
    texts = (text for split in splits for part in corpus.parts[split] for _, text in part.read())
    if cfg.tokenizer == Tokenizer.bpe:
        texts = first_characters(texts, LEARNT_CHARACTERS)
    encoding = build_encoding(cfg.tokenizer, texts, vocab_size=cfg.vocab_size, separated=corpus.separated)
    write_text(kept, json.dumps(encoding_record(encoding)))
    return encoding


def first_characters(texts: Iterator[str], n: int) -> Iterator[str]:
    for text in texts:
        if n <= 0:
            return
        yield text
        n -= len(text)


def keep_if_same(work: Path, plan: list) -> None:
    """Removes what an earlier attempt made in `work` by another plan, as of another revision."""
    path = work / "plan.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == plan:
            return
    for old in (*work.glob("*.bin"), *work.glob("*.json")):
        old.unlink()
    write_text(path, json.dumps(plan))


def tokenise(jobs: dict[Path, Part], encoding: "Encoding", separated: bool, num_proc: int | None) -> None:
    """Writes each part's token file, by as many processes as there are cores where that pays."""
    separator = end_of_text(encoding) if separated else None
    n = min(num_proc or n_cores(), len(jobs) // 2)
    if n < 2:
        for path, part in jobs.items():
            write_shard(path, part, encoding, separator)
        return
    # a fork is quick, and from 3.12 on Python warns of it where there are threads
    context = multiprocessing.get_context("fork" if sys.platform == "linux" and sys.version_info < (3, 12) else "spawn")
    stop = context.RawValue("b", False)
    # not by the map of `datasets`: its manager and workers stay behind, and wait, when this process is killed
    with ProcessPoolExecutor(n, context, begin_worker, (os.getpid(), stop)) as pool, progress(len(jobs)) as advance:
        try:
            with uninterrupted():  # they begin here, and have their parent's ways until begin_worker
                done = [pool.submit(write_shard, path, part, encoding, separator) for path, part in jobs.items()]
            for job in as_completed(done):
                job.result()
                advance()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that tokenised was killed, for want of memory perhaps; the same command goes on, and "
                f"data.num_proc={n // 2} needs less"
            ) from error
        finally:
            stop.value = True
            pool.shutdown(cancel_futures=True)


def begin_worker(parent: int, stop) -> None:
    """Has this process ignore Ctrl-C, which its parent hears too, stop when that is told to, and end when it does."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global stopping
    stopping = stop
    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end of this, on Windows not."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; what is yielded moves it on."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda: bar.advance(task)


def n_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_shard(path: Path, part: Part, encoding: "Encoding", separator: int | None) -> None:
    """One part's token file, and then the note that it is whole."""
    # a worker of a killed attempt may still be at the same part
    aside, total = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.sha256()
    counts = dict.fromkeys(COUNTS, 0)
    dtype = token_dtype(encoding.n_vocab)
    with open(aside, "wb") as file:
        for begins, text in part.read():
            if stopping and stopping.value:
                raise KeyboardInterrupt
            ids = encode(encoding, text)
            if begins and separator is not None:
                ids = np.concatenate([np.array([separator], dtype), ids])
            file.write(ids.data)  # unlike ndarray.tofile, keeps the reason when the disk is full
            total.update(ids.data)
            added = (len(ids), len(text), len(text.encode()), begins)
            counts = {name: counts[name] + n for name, n in zip(COUNTS, added, strict=True)}
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    note = {"file": path.name, **counts, "sha256": total.hexdigest(), "ends_sha256": ends_sha256(path)}
    write_text(note_path(path), json.dumps(note))


def note_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def read_note(path: Path) -> dict | None:
    """What is in a token file; None where it is not whole yet."""
    try:
        note = json.loads(note_path(path).read_text(encoding="utf-8"))
        return note if path.exists() else None
    except (OSError, ValueError):
        return None


def describe(cfg: DataConfig, corpus: Corpus, known: list, encoding: "Encoding", notes: list[dict]) -> dict:
    shards = {split: [note for note in notes if note["file"].startswith(split)] for split in corpus.parts}
    counts = {name: {split: sum(note[name] for note in shards[split]) for split in shards} for name in COUNTS}
    return {
        "format": FORMAT,
        "source": corpus.name,
        "corpus_sha256": digest([*known, corpus.revision]),
        "revision": corpus.revision,
        "separated": corpus.separated,
        "split_rule": split_rule(cfg),
        "tokenizer": encoding_record(encoding),
        "dtype": token_dtype(encoding.n_vocab).name,
        **counts,
        "shards": shards,
        "token_bytes": token_bytes(encoding),
    }


@contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps other processes of this machine from preparing the same; the lock is lifted when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not fcntl:
        yield
        return
    waited = False
    while True:
        with open(path, "w") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not the workers' too
            except (BlockingIOError, PermissionError):
                if not waited:
                    say("another process is preparing this text; waiting for it")
                waited = True
                fcntl.lockf(lock, fcntl.LOCK_EX)
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                continue  # whoever had it has removed it, and a third process may have another
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def count_text(n: int) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1e5 else f"{n:,}"
