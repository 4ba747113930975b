"""How fast text becomes token files, what memory that takes, and that kills change no byte of them.

python -m scripts.bench_prepare [megabytes=1000] [kills=10] [seed=0] [to=results/cpu/prepare.json]

The text is Python's own library, its files in random order again and again, in ten files; the tokens are GPT-2's, whose
vocabulary tiktoken must have. Held against a plain loop of tiktoken over the same files in one process. Linux alone.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from data.shards import whole_sha256
from data.sources import read_stdlib
from errors import UserError
from scripts.options import run_script
from scripts.results import table, write

N_FILES = 10
PIECE = 2**20


@dataclass
class Options:
    megabytes: int = 1000
    kills: int = 10
    seed: int = 0
    to: str | None = None


def write_corpus(folder: Path, megabytes: int, rng: random.Random) -> None:
    texts = [text.encode() for text in read_stdlib().values()]
    for n in range(N_FILES):
        left = megabytes * 10**6 // N_FILES
        with open(folder / f"{n}.txt", "wb") as file:
            while left > 0:
                left -= file.write(rng.choice(texts)[:left])


PLAIN = """
import sys, tiktoken
from pathlib import Path
encoding, n = tiktoken.get_encoding("gpt2"), 0
for path in sorted(Path(sys.argv[1]).glob("*.txt")):
    with open(path, encoding="utf-8", errors="replace") as file:
        while text := file.read(int(sys.argv[2])):
            n += len(encoding.encode_ordinary(text))
print(n)
"""


def memory_mib(pid: int) -> float:
    """Proportional memory of a process and its children."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if pid in (parent, int(stat.parent.name)):
                lines = (stat.parent / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, ValueError, IndexError):
            continue
    return total / 1024


def watched(command: list[str]) -> tuple[float, float, str]:
    """Seconds, the most memory in MiB, and what was printed last."""
    began, most = time.perf_counter(), 0.0
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        most = max(most, memory_mib(process.pid))
        time.sleep(0.1)
    seconds, out = time.perf_counter() - began, process.stdout.read()
    if process.returncode:
        raise UserError(f"{command[:2]} ended with {process.returncode}")
    return seconds, most, out.splitlines()[-1]


def prepare_command(corpus: Path, cache: Path) -> list[str]:
    words = ["data=text", f"data.path='{corpus}'", "data.tokenizer=gpt2", f"data.cache_dir='{cache}'"]
    return ["-m", "scripts.prepare", *words, "data.errors=replace"]


def kill_at_random(command: list[str], seconds: float, rng: random.Random) -> bool:
    """Whether a preparation was killed, the first process or all of them; it may have ended before."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(rng.uniform(0, seconds))
        return False
    except subprocess.TimeoutExpired:
        (os.killpg if rng.random() < 0.5 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        return True


def digests(cache: Path) -> dict[str, str]:
    (folder,) = [path for path in cache.iterdir() if not path.name.startswith(".")]
    return {path.name: whole_sha256(path) for path in folder.iterdir()}


def render(rows: list[dict]) -> str:
    lines = [["", "seconds", "tokens/s", "over the loop", "memory MiB", "bytes"]]
    for r in rows:
        rate = r["tokens"] / r["seconds"] if r["seconds"] else None
        over = rate and f"{rate / (rows[0]['tokens'] / rows[0]['seconds']):.2f}"
        lines.append([
            r["case"], f"{r['seconds']:.0f}" if rate else "-", f"{rate:,.0f}" if rate else "-", over or "-",
            f"{r['memory_mib']:,.0f}" if r["memory_mib"] else "-", r["bytes"],
        ])  # fmt: skip
    return table(lines)


def main(options: Options) -> None:
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        write_corpus(corpus, options.megabytes, rng)
        seconds, memory, n = watched(["-c", PLAIN, str(corpus), str(PIECE)])
        rows = [
            {
                "case": f"plain loop, {options.megabytes:,} MB",
                "seconds": seconds,
                "tokens": int(n),
                "memory_mib": memory,
                "bytes": "-",
            }
        ]
        seconds, memory, out = watched(prepare_command(corpus, Path(place) / "whole"))
        n = sum(int(word.replace(",", "")) for word in out.split() if word.replace(",", "").isdigit())
        rows.append(
            {
                "case": f"scripts.prepare, {os.cpu_count()} cores",
                "seconds": seconds,
                "tokens": n,
                "memory_mib": memory,
                "bytes": "-",
            }
        )
        killed = sum(
            kill_at_random(prepare_command(corpus, Path(place) / "killed"), seconds / 8, rng)
            for _ in range(options.kills)
        )
        watched(prepare_command(corpus, Path(place) / "killed"))
        same = digests(Path(place) / "killed") == digests(Path(place) / "whole")
        rows.append(
            {
                "case": f"the same, killed {killed} times",
                "seconds": None,
                "tokens": n,
                "memory_mib": None,
                "bytes": "the same" if same else "others",
            }
        )
    print(render(rows))
    if options.to:
        write(options.to, rows)
    if not same:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
