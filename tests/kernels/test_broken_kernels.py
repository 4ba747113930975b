"""Each kernel broken on purpose: the comparison with the twin must see it. A break that no longer applies fails too."""

import importlib.util

import pytest

import kernels.launch
from tests.conftest import ROOT
from tests.kernels.twins import INPUTS, assert_as_good_as_twin

pytestmark = pytest.mark.usefixtures("bfloat16_rounds_to_nearest")

# the forward's chunks are wider than the backward's; of five tiles one falls to a program that had one before
NARROW, WIDE, TALL = (11, 37), (2, 8300), (10, 2100)
# {(module, function, shape): {what breaks: (what stands in the source, what is put in its place)}}
BREAKS = {
    ("norm", "layer_norm", NARROW): {
        "padding counts in the variance": ("tl.where(mask, x - mean[:, None], 0.0)", "x - mean[:, None]"),
        "mean over the padded row": ("tl.sum(x, axis=1) / n_cols", "tl.sum(x, axis=1) / BLOCK_N"),
        "no bias": (
            "mask=col_mask, other=0.0).to(ACC)[None, :]\n    tl.store",
            "mask=col_mask, other=0.0).to(ACC)[None, :] * 0\n    tl.store",
        ),
        "dx without mean(g)": ("dx -= (tl.sum(g, axis=1) / n_cols)[:, None]", "pass"),
        "dw of the gained dy": ("dw += dy * x_hat", "dw += dy * x_hat * rstd"),
        "db of x̂": ("db += dy\n", "db += x_hat\n"),
    },
    ("norm", "rms_norm", NARROW): {
        "eps twice": ("axis=1) / n_cols + EPS)", "axis=1) / n_cols + 2 * EPS)"),
        "no gain": ("y *= _load_gain(w_ptr, cols, col_mask", "_load_gain(w_ptr, cols, col_mask"),
        "dx without mean(g · x̂)": ("dx = g - x_hat * (tl.sum(g * x_hat, axis=1) / n_cols)[:, None]", "dx = g"),
        "dx without rstd": ("_store_dx(dx * rstd, dh_ptr", "_store_dx(dx, dh_ptr"),
        "dx without the gain": (
            "g *= _load_gain(w_ptr, cols, col_mask, ZERO_CENTERED, ACC)[None, :]\n            dx = g - x_hat * (",
            "g = g\n            dx = g - x_hat * (",
        ),
    },
    ("norm", "add_layer_norm", NARROW): {
        "no residual": ("h = (x + tl.load(r_ptr + r_at, mask=mask, other=0.0).to(ACC))", "h = x"),
    },
    ("norm", "add_rms_norm", NARROW): {
        "the stream's gradient is lost": ("dx += tl.load(dh_ptr + dh_at, mask=mask, other=0.0).to(ACC)", "pass"),
    },
    ("norm", "rms_norm", (400, 300)): {
        "each program takes one tile": (
            "(n_rows - 1) // BLOCK_M + 1, tl.num_programs(0), num_stages",
            "tl.num_programs(0), tl.num_programs(0), num_stages",
        ),
        "the fold drops partial rows": (
            "for first in range(0, n_parts, BLOCK_M)",
            "for first in range(0, n_parts - 1, BLOCK_M // 64)",
        ),
    },
    ("norm", "layer_norm", WIDE): {
        "wide: lanes merged without their counts": (
            "mean = tl.sum(lane_mean * count, axis=0) / n_cols",
            "mean = tl.sum(lane_mean, axis=0) / BLOCK_N",
        ),
        "wide: lanes merged without their means": (
            "lane_squares += count * (lane_mean - mean) * (lane_mean - mean)",
            "pass",
        ),
        "wide: running mean of the wrong count": ("off / (start // BLOCK_N + 1)", "off / (start // BLOCK_N + 2)"),
        "wide: y not centred": ("x -= mean\n        y = x * rstd", "pass\n        y = x * rstd"),
    },
    ("norm", "add_rms_norm", WIDE): {
        "wide: the sum is read from x": ("source_ptr = h_ptr + row * n_cols", "source_ptr = x_ptr + row * x_stride"),
    },
    ("norm", "rms_norm", TALL): {
        "wide: partial rows start from what lay there": (
            "mask=mask & later, other=0.0) + value",
            "mask=mask, other=0.0) + value",
        ),
        "wide: dx without mean(g · x̂)": ("dx = g - x_hat * mean_g_x_hat", "dx = g"),
    },
    ("norm", "layer_norm", TALL): {
        "wide: partial rows keep the last tile alone": (
            "mask=mask & later, other=0.0) + value",
            "mask=mask & later, other=0.0) * 0 + value",
        ),
        "wide: dx without mean(g)": ("dx -= mean_g\n", "pass\n"),
    },
    ("glu", "swiglu", NARROW): {
        "no sigmoid": ("y = gate / (1.0 + tl.exp(-gate)) * up", "y = gate * up"),
        "dup without the sigmoid": ("dup = dy * gate * s", "dup = dy * gate"),
        "dgate without the slope": ("dgate = dy * up * s * (1.0 + gate * (1.0 - s))", "dgate = dy * up * s"),
    },
    ("glu", "swiglu", (3, 4097)): {
        "tiles of the first column block only": ("cols = tl.program_id(0) % across * BLOCK_N", "cols = 0 * BLOCK_N"),
    },
    ("rotary", "rope", (2, 5, 8)): {
        "turned the wrong way": ("a * cos - b * sin", "a * cos + b * sin"),
        "the backward turns forward": ("sin = -sin", "sin = sin"),
        "one head of each group": (
            "range(first, tl.minimum(first + HEADS, heads))",
            "range(first, tl.minimum(first + 1, heads))",
        ),
        "every batch is the first": ("k_ptr + batch * k_batch", "k_ptr"),
        "every position is the first": ("cos_ptr + time * cos_time", "cos_ptr + 0 * time"),
    },
}


SEEN_WHOLE = set()  # what was seen to pass unbroken


def broken_module(path, module, old, new):
    """kernels.`module` with `old` replaced by `new`, apart from the real one and without operators of its own."""
    source = (ROOT / "kernels" / f"{module}.py").read_text(encoding="utf-8")
    assert old in source
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"broken_{module}", path)
    broken = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.launch, "operator", lambda name, implementation, empty: implementation)
        spec.loader.exec_module(broken)
    return broken


@pytest.mark.parametrize(
    ("module", "name", "shape", "what"), [(*where, what) for where, breaks in BREAKS.items() for what in breaks]
)
def test_the_comparison_sees(module, name, shape, what, tmp_path):
    old, new = BREAKS[module, name, shape][what]
    inputs = INPUTS[name](name, *shape)
    options = {"eps": 0.5} if what.startswith("eps") else {}
    if (module, name, shape) not in SEEN_WHOLE:
        whole = broken_module(tmp_path / "whole.py", module, old, old)
        assert_as_good_as_twin(name, inputs, whole, slack=8, **options)
        SEEN_WHOLE.add((module, name, shape))
    broken = broken_module(tmp_path / "broken.py", module, old, new)
    with pytest.raises(AssertionError, match=r"error .*, allowed"):
        assert_as_good_as_twin(name, inputs, broken, slack=8, **options)
