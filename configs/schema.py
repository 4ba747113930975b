"""The whole configuration, typed. YAML groups beside this file carry values only."""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore

from data.config import DataConfig
from model.config import Kernels, ModelConfig
from training.config import (
    CheckpointConfig,
    CompareConfig,
    Compile,
    Device,
    DistConfig,
    Dtype,
    OptimConfig,
    TrainConfig,
    WandbConfig,
)


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    name: str | None = None
    """The run's folder under runs_dir; made from what was chosen when not given."""
    runs_dir: str = "runs"
    seed: int = 1337
    """Initial weights and dropout."""
    data_seed: int = 1337
    """Order of the batches."""
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    """auto = bfloat16 autocast on CUDA, float32 elsewhere."""
    compile: Compile = Compile.auto
    """auto = full on CUDA, the faster by a trial on a CPU (training.trial); the choice is written into config.yaml."""
    compile_mode: str = "default"
    """reduce-overhead replays CUDA graphs, which pays for small steps; max-autotune tries more kernels for longer."""
    kernels: Kernels = Kernels.auto
    """auto = triton on CUDA, cpu (C) where a CPU runs in float32 without compile, torch's own operators elsewhere."""
    deterministic: bool = False
    """Deterministic algorithms on CUDA too; on a CPU they are always on."""
    against: str | None = None
    """An option of norm or placement, or seed: also train the twin that differs in it alone, in lockstep.

    The twin of `seed` has the next one and the same batches: what separates the two is noise.
    """
    init_from: str | None = None
    """Begin with the weights of a run, its newest, or of a checkpoint, such as runs/NAME/checkpoints/best."""
    resume: bool = False
    """Go on from the newest checkpoint of the run of this name; without one, start."""
    overwrite: bool = False
    """Delete the run of this name first."""
    force: bool = False
    """Resume although the configuration has changed."""


def register() -> None:
    """Makes `Config` the schema that train.yaml is held against."""
    ConfigStore.instance().store(name="schema", node=Config)
