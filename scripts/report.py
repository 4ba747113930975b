"""Draws a comparison again from its compare.json alone: table and verdict on the terminal, Markdown, picture, page.

python -m scripts.report FOLDER_OR_JSON [to=FOLDER]
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from compare.report import console, shown, write_comparison
from errors import UserError
from scripts.options import run_script

KEYS = ("differs", "unit", "notes", "variants", "comparisons", "command", "environment")


@dataclass
class Options:
    given: list[str] = field(default_factory=list)
    to: str | None = None


def read(path: Path) -> dict:
    path = path / "compare.json" if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not all(key in result for key in KEYS) or not result["variants"]:
            raise KeyError
    except FileNotFoundError as e:
        raise UserError(f"{path} does not exist; python -m scripts.compare RUN RUN makes one") from e
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is not a comparison; python -m scripts.compare RUN RUN makes one") from e
    return result


def render(result: dict) -> str:
    """What is printed of a comparison, as text."""
    plain = console(width=110, color_system=None, force_terminal=False)
    with plain.capture() as captured:
        plain.print(shown(result))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def main(options: Options) -> None:
    if len(options.given) != 1:
        raise UserError("give one folder that holds a compare.json, or the file itself")
    path = Path(options.given[0])
    result = read(path)
    place = Path(options.to) if options.to else path if path.is_dir() else path.parent
    written = write_comparison(result, place)
    console().print(shown(result), "", *(f"wrote {p}" for p in written), sep="\n")


if __name__ == "__main__":
    run_script(main, Options, __doc__)
