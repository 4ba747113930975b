"""What a run is called, and the twin of `against`."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.schema import Config, register
from errors import UserError, near

TWIN_GROUPS = ("norm", "placement")
NAMED_GROUPS = ("norm", "placement", "model", "data")  # in the order of a run's name
NOT_IN_NAME = {*NAMED_GROUPS, "seed", "name", "runs_dir", "against", "resume", "overwrite", "force", "train.stop_at"}


def run_name(choices: dict[str, str], overrides: list[str], seed: int) -> str:
    """norm-placement-model-data-sSEED, then every other override; at most 200 characters."""
    parts = [choices[group] for group in NAMED_GROUPS] + [f"s{seed}"]
    for key, value in sorted(dict(o.lstrip("+~").partition("=")[::2] for o in overrides).items()):
        if key == "data.path":
            value = f"{Path(value).name}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"
        if key not in NOT_IN_NAME and not key.startswith(("wandb.", "dist.", "hydra")):
            parts.append(f"{key}={value}")
    name = re.sub(r"[^\w.,=+-]+", "_", "-".join(parts))
    return name if len(name) <= 200 else f"{name[:187]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def to_config(cfg: DictConfig) -> Config:
    return OmegaConf.to_object(cfg)


def composed(*overrides: str) -> Config:
    """The configuration that `python train.py *overrides` would have, for programs that train by themselves."""
    register()
    with hydra.initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
        return to_config(hydra.compose("train", list(overrides)))


def with_twin(run: Config) -> list[Config]:
    """The run that was asked for, named, and, with `against`, its twin: composed anew with that one word changed."""
    job = HydraConfig.get()
    choices, overrides = dict(job.runtime.choices), list(job.overrides.task)
    given_name, run.name = run.name, run.name or run_name(choices, overrides, run.seed)
    if run.against is None:
        return [run]
    group, own, changes = twin_changes(run, choices)
    changed = [o for o in overrides if o.lstrip("+").partition("=")[0] not in (*changes, "against", "name")]
    twin = to_config(hydra.compose("train", [*changed, *(f"{key}={value}" for key, value in changes.items())]))
    if given_name:
        twin.name = f"{given_name}-{run.against}"
    else:
        twin.name = f"{run_name({**choices, **changes}, overrides, twin.seed)}-vs-{own}"
        run.name = f"{run.name}-vs-{run.against}"
    run.wandb.group = twin.wandb.group = run.wandb.group or run.name
    check_twin(run, twin, group)
    return [run, twin]


def twin_changes(run: Config, choices: dict[str, str]) -> tuple[str, str, dict[str, str | int]]:
    """What `against` changes (norm, placement or seed), what the run has there, and what makes the twin of it."""
    if run.against == "seed" and run.init_from:
        raise UserError("against=seed is for other initial weights, and init_from gives both the same; leave one out")
    if run.against == "seed":  # the same batches from other initial weights: what differs between them is noise
        return "seed", f"s{run.seed}", {"seed": run.seed + 1, "data_seed": run.data_seed}
    loader = GlobalHydra.instance().config_loader()
    by_option = {name: group for group in TWIN_GROUPS for name in loader.get_group_options(group)}
    if run.against not in by_option:
        raise UserError(
            f"against={run.against} is neither an option of norm or placement, nor seed; "
            f"{near(run.against, [*by_option, 'seed'])}"
        )
    group = by_option[run.against]
    own = choices[group]
    if own == run.against:
        others = [name for name in by_option if by_option[name] == group and name != own]
        raise UserError(f"against={own} is the run's own {group}; choose another: {', '.join(others)}")
    return group, own, {group: run.against}


def check_twin(run: Config, twin: Config, group: str) -> None:
    """Refuses twins that do not differ in `group`, or differ in anything else."""
    same = {"name": run.name, "against": run.against}
    if group == "seed":
        changed, same["seed"] = twin.seed != run.seed, run.seed
    else:
        changed = twin.model != run.model
        same["model"] = replace(twin.model, **{group: getattr(run.model, group)})
    if replace(twin, **same) != run or not changed:
        raise UserError(
            f"against={run.against} must change {group} alone, but another option or YAML sets what {group} chooses"
        )
