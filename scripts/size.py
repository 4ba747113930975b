"""Prints where size gathers: lines per folder, the longest file and the longest function. It judges nothing.

python -m scripts.size
"""

import ast
from collections import Counter
from pathlib import Path

FOLDERS = ("model", "kernels", "training", "compare", "data", "configs", "scripts", "tests")


def main() -> None:
    files = {f: f.read_text(encoding="utf-8") for folder in FOLDERS for f in sorted(Path(folder).rglob("*.py"))}
    files |= {f: f.read_text(encoding="utf-8") for f in sorted(Path().glob("*.py"))}
    lines = Counter()
    functions = []
    for f, text in files.items():
        lines[f.parts[0]] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and f.parts[0] != "tests":
                functions.append((node.end_lineno - node.lineno + 1, f"{f}:{node.lineno} {node.name}"))
    product = sum(n for folder, n in lines.items() if folder not in ("tests", "scripts"))
    longest = max((text.count("\n"), str(f)) for f, text in files.items() if f.parts[0] != "tests")
    print("lines:", ", ".join(f"{folder} {n}" for folder, n in lines.items()), f"; product {product}")
    print(f"longest file {longest[1]} {longest[0]}; longest function {max(functions)[1]} {max(functions)[0]}")


if __name__ == "__main__":
    main()
