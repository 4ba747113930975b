"""Utf-8 text files of any size, read in pieces between which no tokenizer would join what stands on both sides.

A tokenizer's pattern cuts text into words before it merges anything. GPT-2's, cl100k_base's and o200k_base's all end a
word where a letter or digit is followed by a blank or a new line, and where a new line ends a line of text and a letter
or digit begins the next: there a piece may end, and its ids are those of the whole.
"""

import glob
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data.config import DataConfig, Errors
from data.shards import whole_sha256
from errors import UserError

PIECE = 2**20
"""Characters, or bytes of a file, that a piece has, about: it ends where it may."""
MOST = 2**24
"""Characters, or bytes, after which a piece ends anywhere: no text that is words has as many without a place to end."""
TAILS = (2**8, 2**16)
"""Bytes before a block's end among which its last such place is sought."""
END = re.compile(r"(?<=[^\W_])(?=[ \r\n])|(?<=\S\n)(?=[^\W_])")
FILE_END = re.compile(rf"{END.pattern}|(?<=\S\r\n)(?=[^\W_])")  # "\r\n" of a file becomes "\n"


def universal_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def cut(text: str) -> Iterator[str]:
    """`text` in pieces of about PIECE characters."""
    at = 0
    while len(text) - at > PIECE:
        found = END.search(text, at + PIECE, at + MOST)
        end = found.start() if found else min(at + MOST, len(text))
        yield text[at:end]
        at = end
    yield text[at:]


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file, and of the characters that they stand for those from `first` to `last`."""

    path: str
    begin: int
    end: int
    begins: bool
    """Whether a document begins here."""
    n_chars: int
    first: int = 0
    last: int | None = None


@dataclass(frozen=True)
class FileText:
    """Pieces of files, read again."""

    pieces: list[Piece]
    errors: Errors

    def read(self) -> Iterator[tuple[bool, str]]:
        """Whether a document begins, and the text, piece by piece."""
        for piece in self.pieces:
            with open(piece.path, "rb") as file:
                file.seek(piece.begin)
                raw = file.read(piece.end - piece.begin)
            text = universal_newlines(raw.decode("utf-8", self.errors))
            yield piece.begins, text[piece.first : piece.last]


def text_files(cfg: DataConfig) -> list[Path]:
    """The files of `data.path`, sorted by path; UserError where there is none.

    A path that exists is taken as it is, brackets and stars in its name included. A folder gives every regular file
    below it that is neither hidden nor in a hidden folder, whatever its suffix; a glob narrows that.
    """
    if cfg.path is None:
        raise UserError(f"data={cfg.source} needs data.path=FILE, a folder, or a glob")
    path = Path(cfg.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not is_hidden(p.relative_to(path))]
    elif glob.has_magic(str(path)):
        found = {p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()}
    else:
        raise UserError(f"data.path={cfg.path} is no file or folder, seen from {Path.cwd()}; correct the path")
    if not found:
        raise UserError(f"data.path={cfg.path} matches no file, seen from {Path.cwd()}; ** reaches into subfolders")
    return sorted(found)


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def files_sha256(paths: Iterable[Path]) -> str:
    """Hash of the files' bytes and the borders between them, whatever their names."""
    total = hashlib.sha256()
    for path in paths:
        try:
            total.update(bytes.fromhex(whole_sha256(path)))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
    return total.hexdigest()


def pieces_of(path: Path, errors: Errors) -> Iterator[Piece]:
    """The file in pieces; UserError if it is binary, or not utf-8 with errors=strict. One piece is held at a time."""
    begin, begins = 0, True
    with open(path, "rb") as file:
        raw = bytearray()
        while block := file.read(PIECE):
            raw += block
            if (size := last_end(raw)) is None:
                continue
            yield described(path, begin, bytes(raw[:size]), errors, begins)
            begin, begins = begin + size, False
            del raw[:size]
        if raw:
            yield described(path, begin, bytes(raw), errors, begins)


def last_end(raw: bytearray) -> int | None:
    """Where in `raw` a piece may end, the last such place; from MOST on the last character's border."""
    for size in TAILS:
        tail = raw[-size:].decode("utf-8", "surrogateescape")  # undone without loss
        if end := max((m.start() for m in FILE_END.finditer(tail)), default=0):
            return len(raw) - len(tail[end:].encode("utf-8", "surrogateescape"))
    borders = (at for at in range(len(raw) - 1, 0, -1) if raw[at] & 0xC0 != 0x80 and raw[at - 1] != ord("\r"))
    return next(borders, len(raw)) if len(raw) >= MOST else None


def described(path: Path, begin: int, raw: bytes, errors: Errors, begins: bool) -> Piece:
    if b"\0" in raw:
        raise UserError(
            f"{path} is binary (zero byte at offset {begin + raw.index(0)}); data.path takes utf-8 text, "
            "and a glob such as FOLDER/**/*.txt picks it out"
        )
    try:
        text = universal_newlines(raw.decode("utf-8", errors))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not utf-8: byte 0x{raw[error.start]:02x} at offset {begin + error.start}; convert it, "
            "for example with iconv -f latin1 -t utf-8, or take it as it is with data.errors=replace"
        ) from error
    return Piece(str(path), begin, begin + len(raw), begins, len(text))


def split_characters(pieces: list[Piece], val_fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Cut the concatenation of the pieces at nanoGPT's place, int(n * (1 - val_fraction)) characters."""
    at = int(sum(piece.n_chars for piece in pieces) * (1 - val_fraction))
    train, val = [], []
    for piece in pieces:
        if at >= piece.n_chars:
            train.append(piece)
        elif at <= 0:
            val.append(piece)
        else:
            train.append(replace(piece, n_chars=at, last=at))
            val.append(replace(piece, n_chars=piece.n_chars - at, first=at, begins=False))
        at -= piece.n_chars
    return train, val
