"""Text from a model."""

from typing import TYPE_CHECKING

import torch

from data.tokenizers import decode
from model.gpt import GPT
from model.init import keyed_generator

if TYPE_CHECKING:
    from tiktoken import Encoding


def sample_text(model: GPT, encoding: "Encoding", prompt: list[int], *, n_chars: int, seed: int) -> str:
    """The text of `prompt`, token ids, and n_chars more from the model; equal for equal weights and seed.

    Bytes that are no text, and characters that would move a terminal's cursor, show as U+FFFD.
    """
    model.eval()
    start = torch.tensor([prompt], device=model.embedding.weight.device)
    tokens = model.generate(start, n_chars, generator=keyed_generator(seed, "sample"))
    n_prompt = len(decode(encoding, prompt))
    text = decode(encoding, tokens[0].tolist())[: n_prompt + n_chars]
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
