"""Compiles the kernels for GPUs that this machine need not have, and prints what the compiler says of them.

python -m scripts.compile_ahead [target=sm_90|sm_80|sm_100|gfx942|all] [n_cols=4096] [to=FILE.json]

Registers a thread, spilled bytes, shared memory, instructions, reductions a row, barriers. The kernels are compiled as
they would be launched: the launches themselves are recorded, on tensors without memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from errors import UserError, near
from kernels import glu, norm, rotary
from kernels.launch import INTERPRETED, for_amd
from scripts.kernel_cases import Case
from scripts.options import run_script
from scripts.results import table, write

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# 768 compiles as 1024, 32768 as 65536; the last three are no multiples of 16
COLUMNS = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 37, 1002, 8191)
# name and LayerNorm's bias, which takes the most registers; without it, LayerNorm is RMSNorm and the mean
KERNELS = [
    ("rms_norm", False), ("layer_norm", False), ("layer_norm", True), ("add_rms_norm", False), ("add_layer_norm", True),
    ("swiglu", False), ("rope", False),
]  # fmt: skip
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# arguments of (M, N) elements that are read (but h, which a forward writes)
READ = {f"{name}_ptr" for name in ("x", "r", "h", "dy", "dh", "gate", "up", "q", "k")}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass
class Options:
    target: str = "sm_90"
    n_cols: int | None = None
    to: str | None = None


def cases(columns: Iterable[int] = COLUMNS, kernels=KERNELS) -> list[Case]:
    """Every kernel at every size, in two dtypes."""
    return [
        Case(name, 2048, n_cols, dtype, bias)
        for name, bias in kernels
        for dtype in ("bf16", "fp32")
        for n_cols in columns
    ]


def launches(case: Case) -> list[tuple]:
    """(direction, kernel, arguments, constants) of every launch of a forward and a backward."""
    recorded, direction = [], "forward"
    modules = (norm, glu, rotary)
    real = [module.launch for module in modules]
    for module in modules:
        module.launch = lambda kernel, programs, on, args, constants: recorded.append(
            (direction, kernel, args, constants)
        )
    try:
        outputs = case.call(case.fused, case.inputs("meta"))
        direction = "backward"
        torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    finally:
        for module, launch in zip(modules, real, strict=True):
            module.launch = launch
    return recorded


def signature(kernel, args: tuple, constants: dict) -> tuple[dict, dict, dict]:
    """Types, constants and alignments of a launch's arguments, as Triton's launcher would find them."""
    types, fixed, aligned = {}, {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    for i, name in enumerate(kernel.arg_names):
        value, special = values[name], name not in (kernel.do_not_specialize or ())
        if isinstance(value, torch.Tensor):
            types[name], aligned[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif name in constants or value is None or (value == 1 and special):
            types[name], fixed[name] = "constexpr", value
        else:
            types[name] = "i32" if value < 2**31 else "i64"
            if special and value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    return types, fixed, aligned


def compile_for(target: GPUTarget, kernel, args: tuple, constants: dict):
    if target.backend == "hip":
        constants = for_amd(constants, target.warp_size)
    types, fixed, aligned = signature(kernel, args, {k: v for k, v in constants.items() if k in kernel.arg_names})
    options = {k: v for k, v in constants.items() if k not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def nvidia(compiled) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", dump)[1]),
        "spilled_bytes": int(re.search(r"STACK:(\d+)", dump)[1]),  # spills are all that uses the stack here
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+[^;]*;", dump, re.M)),
        "barriers": len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx)),
        "loads_of_16_bytes": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.c[ag]\S* .*, 0x10", ptx)),
        "float64": len(re.findall(r"\.f64", ptx)),
        "fused_multiply_adds": len(re.findall(r"\bfma\.rn\.f32", ptx)),
    }


def amd(compiled) -> dict:
    text = compiled.asm["amdgcn"]
    body = text[: text.index(".section", text.index("s_endpgm"))]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1]),
        "spilled_bytes": int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1]),
        "instructions": len(re.findall(r"^\t[vs]_|^\t(?:global|buffer|ds|flat)_", body, re.M)),
        "barriers": len(re.findall(r"\bs_barrier", body)),
        "loads_of_16_bytes": len(re.findall(r"(?:global|buffer)_load_dwordx4", body)),
        "float64": len(re.findall(r"_f64", body)),
        "fused_multiply_adds": len(re.findall(r"\bv_(?:pk_)?fmac?_f32", body)),
    }


def resources(name: str, cases: Iterable[Case]) -> Iterator[dict]:
    """One row for each launch of each case; equal launches are compiled once."""
    target, done = TARGETS[name], {}
    for case in cases:
        for direction, kernel, args, constants in launches(case):
            key = (kernel, repr(signature(kernel, args, constants)), repr(sorted(constants.items())))
            if key not in done:
                compiled = compile_for(target, kernel, args, constants)
                row = nvidia(compiled) if target.backend == "cuda" else amd(compiled)
                axis = 0 if kernel is norm._forward_wide_kernel else 1  # the others add up columns over axis 0
                reduction = rf'"tt\.reduce"\(.*\) <{{axis = {axis} : i32'
                row["reductions_per_row"] = len(re.findall(reduction, compiled.asm["ttir"]))
                # offsets of rows are int64; int32 is multiplied by constants alone
                products = re.findall(r"arith\.muli %(\w+), %(\w+)\S* : (?:i32|tensor<\S*xi32>)", compiled.asm["ttir"])
                row["int32_products"] = sum(not a.startswith("c") and not b.startswith("c") for a, b in products)
                row["shared_bytes"] = compiled.metadata.shared
                done[key] = row
            yield {
                "target": name,
                "kernel": case.label,
                "direction": direction,
                "launch": kernel.__name__.strip("_"),
                "n_cols": case.n_cols,
                "dtype": case.dtype,
                "bytes_per_element": round(case.n_bytes(direction) / (case.n_rows * case.n_cols), 3),
                "tensors_read": sum(
                    name in READ and a is not None for name, a in zip(kernel.arg_names, args, strict=False)
                ),
                **done[key],
            }


SHOWN = {
    "kernel": "kernel",
    "launch": "launch",
    "dtype": "dtype",
    "n_cols": "N",
    "bytes_per_element": "bytes/element",
    "registers": "registers",
    "spilled_bytes": "spilled",
    "shared_bytes": "shared",
    "reductions_per_row": "reductions/row",
    "barriers": "barriers",
    "instructions": "instructions",
}


def render(rows: list[dict]) -> str:
    return table([list(SHOWN.values()), *([str(row[key]) for key in SHOWN] for row in rows)])


def main(options: Options) -> None:
    if options.target not in (*TARGETS, "all"):
        raise UserError(f"target={options.target} is not known; {near(options.target, [*TARGETS, 'all'])}")
    if options.n_cols is not None and options.n_cols < 1:
        raise UserError(f"n_cols={options.n_cols} must be at least 1")
    if INTERPRETED:
        raise UserError("nothing is compiled under TRITON_INTERPRET=1: run it without that variable")
    rows = []
    for name in TARGETS if options.target == "all" else [options.target]:
        compiled = list(resources(name, cases([options.n_cols] if options.n_cols else COLUMNS)))
        print(f"{name}, Triton {triton.__version__}\n\n{render(compiled)}\n", flush=True)
        rows += compiled
    if options.to:
        write(options.to, rows)


if __name__ == "__main__":
    run_script(main, Options, __doc__)
