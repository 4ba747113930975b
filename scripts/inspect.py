"""What a data set holds: size, vocabulary, longest documents, excerpts; every token file is held against its checksum.

python -m scripts.inspect data=tinystories data.tokenizer=gpt2

Takes train.py's options, and prepares what is not prepared yet.
"""

import heapq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.schema import Config
from data.shards import Shards, whole_sha256
from data.tokenizers import END_OF_TEXT, decode
from data.tokens import TokenData, open_tokens, token_folder
from errors import UserError
from scripts.options import run_as_train
from scripts.results import table

LONGEST, EXCERPTS, SHOWN = 5, 3, 70  # documents, places, characters


@dataclass
class Count:
    """What one pass over a split's tokens finds."""

    ids: np.ndarray
    """(vocab_size,) how often each id occurs."""
    documents: int = 0
    longest: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, first token), shortest first."""


def count(tokens: Shards, data: TokenData) -> Count:
    found, begun, at = Count(np.zeros(data.vocab_size, np.int64)), 0, 0
    for ids in tokens.chunks():
        found.ids += np.bincount(ids, minlength=data.vocab_size)
        for border in (at + np.flatnonzero(ids == data.separator)).tolist() if data.separator is not None else ():
            note(found, begun, border)
            begun = border
        at += len(ids)
    note(found, begun, at)
    return found


def note(found: Count, begin: int, end: int) -> None:
    """Counts the document from `begin` to `end`."""
    if end > begin:
        found.documents += 1
        heapq.heappush(found.longest, (end - begin, begin))
        if len(found.longest) > LONGEST:
            heapq.heappop(found.longest)


def excerpt(tokens: Shards, data: TokenData, at: int, n_tokens: int = SHOWN) -> str:
    ids = tokens.take(np.array([at]), min(n_tokens, SHOWN, len(tokens) - at))[0]
    text = decode(data.encoding, ids.tolist()).removeprefix(END_OF_TEXT)
    return repr(text[:SHOWN])


def check_whole(folder: Path, shards: dict[str, list[dict]]) -> None:
    for shard in (shard for own in shards.values() for shard in own):
        if whole_sha256(folder / shard["file"]) != shard["sha256"]:
            raise UserError(
                f"{folder / shard['file']} is damaged, by its checksum; delete {folder} to prepare it again"
            )


def main(cfg: Config) -> None:
    if cfg.data.stream:
        raise UserError("data.stream=true keeps no tokens to look at; leave it out, with a smaller data set perhaps")
    data = open_tokens(cfg.data, print)
    splits = {"train": data.train, "val": data.val}
    if shards := data.record.get("shards"):
        folder = token_folder(cfg.data) if cfg.data.source != "bin" else Path(cfg.data.path).expanduser()
        check_whole(folder, shards)
        print(f"{folder}: {sum(map(len, shards.values()))} token files, whole by their checksums")
    kind, dtype = data.encoding.name, data.record["dtype"]
    print(f"{data.record['source']}; tokens of {kind}, {dtype}; {data.record['split_rule']}\n")
    counts = {split: count(tokens, data) for split, tokens in splits.items()}
    everything = sum(map(len, splits.values()))
    rows = [["split", "tokens", "share", "documents", "MB of text", "bytes/token", "ids that occur"]]
    for split, tokens in splits.items():
        n_bytes, text = int(counts[split].ids @ data.token_bytes), int((data.token_bytes > 0) @ counts[split].ids)
        used = f"{np.count_nonzero(counts[split].ids):,} of {data.vocab_size:,}"
        rows.append([
            split, f"{len(tokens):,}", f"{len(tokens) / everything:.2%}", f"{counts[split].documents:,}",
            f"{n_bytes / 1e6:,.1f}", f"{n_bytes / max(1, text):.2f}", used,
        ])  # fmt: skip
    print(table(rows))
    ids = counts["train"].ids
    most = [f"{decode(data.encoding, [int(i)])!r} {ids[i] / len(data.train):.1%}" for i in np.argsort(-ids)[:10]]
    print(f"\nmost frequent: {', '.join(most)}")
    for split, tokens in splits.items():
        longest = [[f"{n:,}", f"{at:,}", excerpt(tokens, data, at, n)] for n, at in sorted(counts[split].longest)[::-1]]
        print(f"\nlongest documents of {split}:\n" + table([["tokens", "from token", "which begins"], *longest]))
        places = np.linspace(0, max(0, len(tokens) - SHOWN), EXCERPTS, dtype=np.int64).tolist()
        print(*(f"\nat token {at:,}: {excerpt(tokens, data, at)}" for at in places), sep="")


if __name__ == "__main__":
    run_as_train(main, __doc__)
