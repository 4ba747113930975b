"""Text from a trained run.

python -m scripts.sample run=runs/NAME prompt="def " [n_chars=200] [seed=0] [checkpoint=best|last] [device=auto]
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from omegaconf import OmegaConf

from configs.schema import Config
from errors import UserError
from model.config import Kernels
from scripts.options import run_script
from training.config import Device, DistConfig, Dtype


class Which(StrEnum):
    best = "best"
    last = "last"


@dataclass
class Options:
    run: str
    prompt: str = "\n"
    n_chars: int = 200
    seed: int = 0
    checkpoint: Which = Which.best
    device: Device = Device.auto


def load_config(folder: Path) -> Config:
    """The typed configuration of a run folder; UserError where there is none."""
    path = folder / "config.yaml"
    if not path.exists():
        raise UserError(f"{folder} is no run: it has no config.yaml; run folders lie under runs/")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))


def main(options: Options) -> None:
    from data.tokenizers import encode, encoding_from_record, end_of_text
    from model.gpt import GPT
    from training import checkpoint
    from training.device import settle
    from training.sample import sample_text

    folder = Path(options.run)
    cfg = load_config(folder)
    cfg.device, cfg.kernels, cfg.dtype = options.device, Kernels.auto, Dtype.auto  # of this machine, not of the run's
    cfg.dist = DistConfig()
    settle(cfg)
    encoding = encoding_from_record(json.loads((folder / "environment.json").read_text())["data"]["tokenizer"])
    separator = end_of_text(encoding) if cfg.data.document_mask else None
    saved = folder / "checkpoints" / "best"
    if options.checkpoint == Which.last:
        steps = checkpoint.steps_saved(folder / "checkpoints")
        saved = checkpoint.step_folder(folder / "checkpoints", steps[-1] if steps else 0)
    try:
        saved, _ = checkpoint.check(saved)
    except checkpoint.CorruptCheckpoint as e:
        raise UserError(f"{saved} is missing or damaged ({e}); checkpoint=best|last says which one to take") from e
    model = GPT(cfg.model, encoding.n_vocab, kernels=cfg.kernels, separator=separator).to(cfg.device)
    checkpoint.restore(saved, {"model": checkpoint.model_tensors(model)})
    prompt = encode(encoding, options.prompt).tolist()
    if not prompt or options.n_chars < 1:
        raise UserError("prompt must hold a character, and n_chars must be at least 1")
    print(sample_text(model, encoding, prompt, n_chars=options.n_chars, seed=options.seed))


if __name__ == "__main__":
    run_script(main, Options, __doc__)
