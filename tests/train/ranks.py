"""Several processes that train together, without torchrun: forked from a server that has imported PyTorch already."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

from configs.schema import Config

context = multiprocessing.get_context("forkserver") if sys.platform == "linux" else multiprocessing.get_context("spawn")
context.set_forkserver_preload(["train", "training.watchdog", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _train(rank: int, size: int, port: int, configs: list[Config], log: Path, prepare) -> None:
    import torch

    import train as program
    from configs.cli import explain

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2)
    torch.set_num_threads(1)
    if prepare:
        prepare(rank)
    try:
        program.train(configs)
    except Exception as error:
        status = explain(error)
        if status is None:
            raise
        sys.exit(status)


def train_on(size: int, *configs: Config, prepare=None, timeout: float = 400) -> tuple[list[int], list[str]]:
    """Trains `configs` on `size` processes, each after `prepare(rank)`; exit statuses and what each process printed."""
    folder, port = Path(configs[0].runs_dir), free_port()
    folder.mkdir(exist_ok=True)
    logs = [folder / f"{port}-{rank}.log" for rank in range(size)]
    processes = [
        context.Process(target=_train, args=(rank, size, port, list(configs), log, prepare))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes], [log.read_text() for log in logs]
