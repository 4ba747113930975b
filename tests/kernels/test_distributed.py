"""The kernels inside DDP and FSDP2, two processes on gloo: the gradients of one process with the whole batch."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import kernels
from model.config import Kernels, ModelConfig, NormConfig, NormKind
from model.gpt import GPT

CONFIG = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "bias": True}


def build(kind):
    return GPT(ModelConfig(norm=NormConfig(kind=kind), **CONFIG), 11, kernels=Kernels.triton, seed=1)


def batch():
    return torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def process(rank, kind, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    alone = build(kind)
    alone(batch(), batch()).backward()
    for wrap in (DistributedDataParallel, shard):
        model = wrap(build(kind))
        mine = batch().chunk(2)[rank]
        model(mine, mine).backward()
        parameters = model.module.named_parameters() if wrap is DistributedDataParallel else model.named_parameters()
        for (name, p), q in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6, msg=f"{wrap.__name__}, {name}")
    weight = model.final_norm.weight  # sharded
    with pytest.raises(TypeError, match=r"weight is a DTensor.*kernels=torch"):
        kernels.rms_norm(DTensor.to_local(weight)[None], weight)
    dist.barrier()  # whoever leaves first would close the connections of the other
    dist.destroy_process_group()
    os._exit(0)  # all is asserted; at exit gloo's threads, ended by the interpreter, now and then abort the process


def test_ddp_and_fsdp2(tmp_path):
    """LayerNorm with its bias; RMSNorm goes the same way with fewer parameters."""
    mp.start_processes(process, args=(NormKind.layernorm, str(tmp_path / "store")), nprocs=2, start_method="spawn")
