"""Compares two or more runs: what differs, how far apart they are, and whether seed noise allows to say so.

python -m scripts.compare RUN RUN... [to=FOLDER] [margin=0.01] [tolerance=0.02]

RUN is a run's folder; the first one's variant is the baseline. Runs that differ by seeds alone are replicates. Prints
tables and verdicts, and writes compare.json, compare.md, compare.png and report.html into a folder beside the runs, or
where to= says.
"""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

from compare.comparison import compare
from compare.report import console, shown, write_comparison
from errors import UserError
from records import is_run, load_run
from scripts.options import run_script
from training.environment import command


@dataclass
class Options:
    runs: list[str] = field(default_factory=list)
    to: str | None = None
    margin: float | None = None
    tolerance: float | None = None


def run_folders(words: list[str]) -> list[Path]:
    """Folders of runs; those that hold an earlier comparison alone, as runs/* finds them, are passed over."""
    folders = [Path(word).resolve() for word in words]
    return [f for f in dict.fromkeys(folders) if is_run(f) or not (f / "compare.json").exists()]


def place_of(folders: list[Path]) -> Path:
    """The comparison's own: of the same runs in the same order it is the same."""
    names = " ".join(map(str, folders))
    return folders[0].parent / f"compare-{hashlib.sha256(names.encode()).hexdigest()[:8]}"


def main(options: Options) -> None:
    folders = run_folders(options.runs)
    if len(folders) < 2:
        raise UserError(f"give two runs or more, like runs/A runs/B; got {' '.join(options.runs) or 'none'}")
    for name, value in (("margin", options.margin), ("tolerance", options.tolerance)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name}={value} must be a number above 0")
    place = Path(options.to) if options.to else place_of(folders)
    if place.exists() and not place.is_dir():
        raise UserError(f"to={place} is a file; it must be a folder")
    result = compare([load_run(f) for f in folders], margin=options.margin, tolerance=options.tolerance)
    result["command"] = command()
    written = write_comparison(result, place)
    console().print(shown(result), "", *(f"wrote {path}" for path in written), sep="\n")


if __name__ == "__main__":
    run_script(main, Options, __doc__)
