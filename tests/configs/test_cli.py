"""Options that do not exist, names of runs, the twin of `against`; sweeps and exit codes through the real program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore

from configs.cli import check_overrides, command, options, schema_keys
from configs.schema import register
from configs.twin import run_name
from errors import UserError
from model.config import NormKind, Placement
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def schema():
    register()


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("norm=rms", "rmsnorm"),
        ("norm=layernorm,rms", "rmsnorm"),
        ("optim.lrr=1", "optim.lr"),
        ("+optim.lrr=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("placment=post", "placement"),
        ("experiment=nanogpt", "nanogpt_cpu"),
        ("optim.lr=fast", "could not be converted"),
        ("train.steps=1.5", "could not be converted"),
        ("device=gpu", "expected one of"),
        ("norm", "key=value"),
        ("data.path=a b (1).txt", "quotes of its own"),
        ("--norm=rmsnorm", "without dashes"),
        ("model.norm.kind=rmsnorm", "write norm=rmsnorm"),
        ("model.placement=post", "write placement=post"),
        ("optim.lr=nan", "finite"),
        ("norm=null", "not an option"),
        ("train.grad_clip=inf", "finite"),
        ("hydra/launcher=joblob", "near names: joblib"),
        ("openmp=1", "near names: optim, optim.eps"),
        ("runs_dir=a,b", "in one folder"),
    ],
)
def test_refused(override, near):
    with pytest.raises(UserError, match=near):
        check_overrides(["-m", override])


def test_several_values_need_a_sweep():
    with pytest.raises(UserError, match="-m"):
        check_overrides(["norm=layernorm,rmsnorm"])


@pytest.mark.parametrize(
    "override",
    ["norm=rmsnorm", "optim.lr=1", "optim.lr=1e-3,1e-4", "experiment=null", "data.path='a b'", "~experiment", "name=x",
     "norm=glob(*)", "optim.lr=interval(0.1,0.2)", "hydra.verbose=true", "seed=range(1,4)",
     "train.eval_tokens=null", "optim.lr=${optim.min_lr}"],
)  # fmt: skip
def test_accepted(override):
    check_overrides(["-m", override])


def test_a_launcher_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(ConfigStore, "list", lambda self, path: ["basic.yaml"])
    with pytest.raises(UserError, match="pip install hydra-submitit-launcher"):
        check_overrides(["-m", "hydra/launcher=submitit_local"])
    check_overrides(["-m", "hydra/launcher=basic"])


def test_tab_completion_is_hydras():
    check_overrides(["-sc", "install=bash"])


def test_config_dir_adds_options(tmp_path):
    (tmp_path / "norm").mkdir()
    (tmp_path / "norm" / "mine.yaml").write_text("")
    check_overrides([f"--config-dir={tmp_path}", "norm=mine"])


def test_every_option_of_a_table_has_its_yaml():
    folder = [ROOT / "configs"]
    assert options("norm", folder) == sorted(NormKind)
    assert options("placement", folder) == sorted(Placement)
    assert not set(options("norm", folder)) & set(options("placement", folder))


def test_schema_keys():
    assert {"model.norm.eps", "optim.lr", "name", "train"} <= set(schema_keys())


def test_run_name():
    choices = {"norm": "rmsnorm", "placement": "pre", "model": "tiny", "data": "stdlib", "experiment": "x"}
    name = run_name(choices, ["norm=rmsnorm", "optim.lr=1e-3", "resume=true", "wandb.mode=offline"], 7)
    assert name == "rmsnorm-pre-tiny-stdlib-s7-optim.lr=1e-3"
    paths = [run_name(choices, [f"data.path={folder}/where.txt"], 7) for folder in "ab"]
    assert paths[0] != paths[1]
    assert all("-data.path=where.txt-" in name for name in paths)
    assert run_name(choices, ["optim.lr=1", "optim.lr=2"], 7).endswith("s7-optim.lr=2")
    long = [run_name(choices, [f"data.tokenizer={'x' * 300}{i}"], 7) for i in range(2)]
    assert long[0] != long[1]
    assert all(len(name) <= 200 for name in long)


@pytest.fixture
def program(tmp_path, train_py):
    """program(*args, check=True) -> what train.py ends with, made small, in a folder of the test's own."""

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess:
        done = train_py(*args, *shrinking(tmp_path, args))
        assert done.returncode == 0 or not check, done.stderr
        return done

    return run


def shrinking(tmp_path, args: tuple[str, ...]) -> list[str]:
    small = [
        f"runs_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/tokens", "data=text", f"data.path={tmp_path}/text.txt",
        "model.n_layer=1", "model.n_head=1", "model.block_size=16", "train.steps=3",
        "train.batch_size=2", "train.eval_tokens=64", "train.sample_chars=0", "wandb.mode=disabled", "device=cpu",
    ]  # fmt: skip
    return small if any("n_embd" in arg for arg in args) else [*small, "model.n_embd=16"]


def test_the_twin_differs_in_one_key_alone(program, tmp_path, text_file):
    program("norm=rmsnorm", "against=layernorm", "optim.lr=1e-2")
    texts = {f.parent.name: f.read_text().splitlines() for f in tmp_path.glob("runs/*/config.yaml")}
    a, b = (texts[name] for name in sorted(texts))
    differing = {line.split(":")[0].strip() for x, y in zip(a, b, strict=True) if x != y for line in (x, y)}
    assert differing == {"kind", "name", "against"}
    assert [name.split("-")[0] for name in sorted(texts)] == ["layernorm", "rmsnorm"]
    assert all("-vs-" in name for name in texts)


def test_the_twin_of_a_seed_differs_in_the_initial_weights_alone(program, tmp_path, text_file):
    program("seed=5", "against=seed", "name=aa", "norm=rmsnorm")
    run, twin = (yaml.safe_load((tmp_path / "runs" / name / "config.yaml").read_text()) for name in ("aa", "aa-seed"))
    assert {key: (run[key], twin[key]) for key in run if run[key] != twin[key]} == {
        "name": ("aa", "aa-seed"), "seed": (5, 6), "against": ("seed", None)
    }  # fmt: skip
    assert run["data_seed"] == 5
    losses = [(tmp_path / "runs" / name / "metrics.jsonl").read_text() for name in ("aa", "aa-seed")]
    assert losses[0] != losses[1]


def test_names_and_mistakes_of_the_twins_of_a_seed(monkeypatch, tmp_path, capsys):
    def configs(*words: str) -> list:
        seen = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *words[1:], f"against={words[0]}"])
        command(seen.append)()
        return seen[0]

    run, twin = configs("seed", "seed=5", "data_seed=9", "norm=rmsnorm")
    assert run.name == "rmsnorm-pre-tiny-stdlib-s5-data_seed=9-vs-seed"
    assert twin.name == "rmsnorm-pre-tiny-stdlib-s6-data_seed=9-vs-s5"
    assert (run.data_seed, twin.data_seed) == (9, 9)
    assert run.wandb.group == twin.wandb.group == run.name
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "by_seed.yaml").write_text("# @package _global_\ntrain:\n  steps: ${seed}\n")
    mistakes = {
        ("seed", f"--config-dir={tmp_path}", "experiment=by_seed"): "must change seed alone",
        ("seeds",): "near names: seed",
        ("nothing",): "seed",
    }
    for words, said in mistakes.items():
        with pytest.raises(SystemExit, match="2"):
            configs(*words)
        assert said in capsys.readouterr().err


def test_twins_must_differ_in_the_one_option_alone(program, tmp_path, text_file):
    done = program("norm=rmsnorm", "against=layernorm", "model.norm={kind:rmsnorm}", check=False)
    assert done.returncode == 2
    assert "must change norm alone" in done.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_a_failing_job_of_a_sweep_does_not_stop_the_others(program, tmp_path, text_file):
    args = ["-m", "norm=layernorm,rmsnorm", "optim.beta1=0.9,1.5"]
    done = program(*args, check=False)
    assert done.returncode == 1
    assert "2 jobs failed" in done.stderr
    assert "Traceback" not in done.stderr
    finished = [json.loads(f.read_text())["status"] for f in tmp_path.glob("runs/*/summary.json")]
    assert finished == ["finished"] * 2
    again = program("norm=layernorm,rmsnorm", "-m", "optim.beta1=0.9")  # in any order
    assert again.stderr.count("finished before") == 2


def test_a_later_job_of_a_sweep_has_a_peak_memory_of_its_own(tmp_path, text_file):
    args = ("-m", "model.n_embd=1024,16", "norm=rmsnorm", "against=layernorm")
    command = [sys.executable, "train.py", *args, *shrinking(tmp_path, args)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    peaks = {1024: set(), 16: set()}
    for f in tmp_path.glob("runs/*/summary.json"):
        width = yaml.safe_load((f.parent / "config.yaml").read_text())["model"]["n_embd"]
        peaks[width].add(json.loads(f.read_text())["process_peak_mib"])
    big, small = peaks.values()
    assert len(big) == len(small) == 1  # it is the process's, so both twins say the same
    if Path("/proc/self/clear_refs").exists():
        assert small.pop() < big.pop()


@pytest.mark.parametrize(
    "args", [["norm=rms"], ["norm=rmsnorm", "against=rmsnorm"], ["against=nothing"], ["model.dropout=2"]]
)
def test_a_mistake_exits_2_without_a_traceback(program, tmp_path, args):
    (tmp_path / "text.txt").write_text("x" * 1000)
    done = program(*args, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_a_mistake_is_all_that_a_process_of_its_own_prints():
    done = subprocess.run([sys.executable, "train.py", "norm=rms"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_hydra_habits(train_py):
    job = train_py("--cfg", "job", "norm=rmsnorm")
    assert job.returncode == 0
    assert "kind: rmsnorm" in job.stdout
    help_ = train_py("--help")
    assert help_.returncode == 0
    assert "norm: identity, layernorm, rmsnorm" in help_.stdout
