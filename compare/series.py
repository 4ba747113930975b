"""Curves short enough to draw and to keep: at most 400 points, each the mean of as many steps."""

import numpy as np

from records import RunRecord

POINTS = 400
DIGITS = 6  # significant ones that are kept


def rounded(values: np.ndarray) -> list:
    """Plain numbers of 6 significant digits, None where not finite."""
    return [float(f"{v:.{DIGITS}g}") if np.isfinite(v) else None for v in np.asarray(values, dtype=float)]


def binned(values: np.ndarray, *, as_list: bool = True) -> list | np.ndarray:
    """(n,) -> at most 400 means of consecutive values."""
    size = max(1, -(-len(values) // POINTS))
    starts = np.arange(0, len(values), size)
    means = np.add.reduceat(values, starts) / np.diff([*starts, len(values)]) if len(values) else np.zeros(0)
    return rounded(means) if as_list else means


def seconds_at_evaluations(run: RunRecord) -> np.ndarray:
    """Seconds of training steps before each evaluation, (n,)."""
    return np.concatenate([[0.0], run.seconds])[np.searchsorted(run.step, run.val_step, "right")]


def variant_series(runs: list[RunRecord], scales: list[float]) -> dict:
    """Training and validation curves of each run, seconds of training at evaluations, and quantiles of step times."""
    curves = []
    for run, scale in zip(runs, scales, strict=True):
        curves.append(
            {
                "step": binned(run.step),
                "train": binned(run.loss * scale),
                "val_step": run.val_step.tolist(),
                "val": rounded(run.val_loss * scale),
                "val_seconds": rounded(seconds_at_evaluations(run)),
            }
        )
    times = np.concatenate([run.step_ms[run.timed] for run in runs])
    quantiles = np.quantile(times, np.linspace(0.005, 0.995, 100)) if len(times) else np.zeros(0)
    return {"runs": curves, "step_ms_quantiles": rounded(quantiles)}
