"""Keeps what a run measured as one JSON file, for README and docs to quote; prints the table that it holds.

python -m scripts.record run=runs/NAME [baseline=runs/TWIN] to=results/FOLDER/NAME.json
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from compare.report import comparison_sentences, summary
from errors import UserError
from scripts.options import run_script


@dataclass
class Options:
    run: str
    to: str
    baseline: str | None = None


def read(path: Path) -> dict:
    if not path.exists():
        raise UserError(f"{path} does not exist; only a run that has finished has one")
    return json.loads(path.read_text())


def collect(run: Path, baseline: Path | None) -> dict:
    """Command, environment, summaries and comparison of one finished run, or of two twins."""
    folders = [run] if baseline is None else [run, baseline]
    environment = read(run / "environment.json")
    return {
        "command": environment.pop("command"),
        "environment": environment,
        "runs": [read(folder / "summary.json") for folder in folders],
        "comparison": None if baseline is None else read(run / "compare.json"),
    }


def render(result: dict) -> str:
    """The table and sentences of a result, as train.py printed them."""
    console = Console(width=110, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        sentences = comparison_sentences(result["comparison"]) if result["comparison"] else []
        console.print(summary(result["runs"], sentences))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def main(options: Options) -> None:
    result = collect(Path(options.run), Path(options.baseline) if options.baseline else None)
    path = Path(options.to)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(render(result))


if __name__ == "__main__":
    run_script(main, Options, __doc__)
