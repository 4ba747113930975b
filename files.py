"""Files written whole or not at all, and JSON that every reader takes."""

import json
import math
import os
import re
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, be it a power cut that ends it."""
    aside = path.with_name(f".new-{path.name}")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, values: dict) -> None:
    """Strict JSON: a number that is not finite becomes null. Numbers in a row share a line."""
    text = json.dumps(finite(values), indent=1, allow_nan=False)
    number = r"(?:-?\d[\d.e+-]*|null)"
    text = re.sub(rf"\n\s+(?={number}(?:,?\n))", " ", text)
    write_text(path, re.sub(r"(?<=[\dl])\n\s+(?=\])", "", text) + "\n")


def finite(value):
    """`value` with None for every float in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
