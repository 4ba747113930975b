"""Compile the norm kernels for GPUs this machine need not have, and print what the compiler says as JSON.

Run it in a process of its own without TRITON_INTERPRET: `PYTHONPATH=. python tests/kernels/ahead_of_time.py`.
"""

import json
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import norm

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNELS = {"forward": norm._forward_kernel, "backward": norm._backward_kernel}
ARGUMENT = (".param .f64", "ld.param.b64", "ld.param.f64", "cvt.rn.f32.f64")  # eps declared, read, and narrowed once
# (architecture, dtype, N, CENTER): LayerNorm with weight and bias holds most registers, RMSNorm is looked at once
CASES = [(arch, dtype, n, True) for arch in (80, 90) for dtype in ("bf16", "fp32") for n in (64, 1024, 4096, 8192)]
CASES.append((90, "bf16", 4096, False))
ALIGNED = {"x_stride", "dy_stride", "n_cols"}  # multiples of 16, as the launcher would find them


def argument_type(kernel, name, dtype):
    declared = kernel.params[kernel.arg_names.index(name)].annotation_type
    if name in ("mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr", "w_ptr", "b_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return declared or "i32"


def compile_ahead(direction, arch, dtype, n, center):
    kernel, tile = KERNELS[direction], norm._tile(n)
    constants = {"CENTER": center, "ZERO_CENTERED": False, "ACC": triton.language.float32}
    constants |= {name: tile[name] for name in ("BLOCK_M", "BLOCK_N")}
    if not center:
        constants |= dict.fromkeys(("mean_ptr", "b_ptr", "db_ptr"))
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {a: "constexpr" if a in constants else argument_type(kernel, a, dtype) for a in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile["num_warps"]})


def resources(cubin):
    """{'REG': 59, 'STACK': 0, ...} as the assembler allotted them; STACK above 0 means spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = (field.split(":") for field in text.split() if field.startswith(("REG:", "STACK:")))
    return {name: int(value) for name, value in fields}


def report():
    """One entry for each kernel and case."""
    for arch, dtype, n, center in CASES:
        for direction in KERNELS:
            compiled = compile_ahead(direction, arch, dtype, n, center)
            lines = [line.strip() for line in compiled.asm["ptx"].splitlines()]
            yield {
                "case": f"{direction} sm_{arch} {dtype} N={n} CENTER={center}",
                "f64": [line for line in lines if ".f64" in line and not line.startswith(ARGUMENT)],
                "global_loads": [line for line in lines if "ld.global" in line],
                **resources(compiled.asm["cubin"]),
            }


def refusal():
    """What a CPU tensor gets outside the interpreter."""
    try:
        norm.rms_norm(torch.ones(2, 4))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps({"kernels": list(report()), "refusal": refusal()}))
