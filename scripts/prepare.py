"""Tokenises a data set, as train.py does at its first use, with the same options.

python -m scripts.prepare data=tinystories data.tokenizer=gpt2 [data.num_proc=8] [data.cache_dir=FOLDER]

By as many processes as there are cores. Killed, it goes on where it was; what it makes is the same.
"""

from configs.schema import Config
from data.config import Source
from data.tokens import open_tokens, token_folder
from errors import UserError
from scripts.options import run_as_train


def main(cfg: Config) -> None:
    if cfg.data.stream or cfg.data.source == Source.bin:
        what = "data.stream=true" if cfg.data.stream else "data=bin"
        raise UserError(f"{what} needs no preparation; train, or see what it holds with python -m scripts.inspect")
    data = open_tokens(cfg.data, print)
    counts = " and ".join(f"{len(tokens):,} {split}" for split, tokens in (("train", data.train), ("val", data.val)))
    print(f"{token_folder(cfg.data)}: {counts} tokens of {data.encoding.name}, {data.record['dtype']}")


if __name__ == "__main__":
    run_as_train(main, __doc__)
