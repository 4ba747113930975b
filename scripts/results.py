"""Rows of measurements: as a table on the terminal, and kept as JSON with command, versions and commit."""

import json
from pathlib import Path

import torch

from training.environment import describe


def write(path: str, rows: list[dict]) -> None:
    """Keeps rows of equal keys with command, versions and commit: JSON, a row a line, values in the order of keys."""
    environment = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    head = {"command": environment.pop("command"), "environment": environment, "keys": list(rows[0])}
    lines = ",\n".join("  " + json.dumps(list(row.values())) for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def read(path: str | Path) -> list[dict]:
    result = json.loads(Path(path).read_text())
    return [dict(zip(result["keys"], row, strict=True)) for row in result["rows"]]


def table(rows: list[list[str]]) -> str:
    """Rows of text in aligned columns, the first row as the head; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row):
        cells = (c.ljust(w) if not c[:1].isdigit() else c.rjust(w) for c, w in zip(row, widths, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])
