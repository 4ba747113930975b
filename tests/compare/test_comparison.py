"""Runs held against each other: grouped, paired, and said to be no more than they are."""

import json
from pathlib import Path

import numpy as np
import pytest

from compare import stats
from compare.comparison import compare
from compare.figures import why_times_differ
from compare.report import comparison_rows, markdown, sentences, variant_rows, verdict_sentence
from errors import UserError
from records import load_run, siblings
from tests.compare.fake_runs import BATCHES, ENVIRONMENT, config, curve, write_run, write_sweep


def compared(*folders: Path, **options) -> dict:
    result = compare([load_run(folder) for folder in folders], **options)
    json.dumps(result, allow_nan=False)  # all of it is plain
    comparison_rows(result), variant_rows(result), markdown(result)
    for c in result["comparisons"]:
        sentences(c, result["unit"])
    return result


def words(result: dict) -> str:
    lines = [line for c in result["comparisons"] for line in sentences(c, result["unit"])]
    return "\n".join(lines + result["notes"])


@pytest.fixture
def pair(tmp_path):
    """pair(**changes of the candidate) -> two folders, baseline first, 1000 steps on the same batches, 0.03 apart."""

    def make(seed=1, environment=None, loss=None, eval_every=100, **changes):
        a = write_run(tmp_path / "a", config(), curve(1000))
        loss = curve(1000, offset=0.03) if loss is None else loss
        cfg = config("rmsnorm", seed=seed, **changes)
        return a, write_run(tmp_path / "b", cfg, loss, eval_every=eval_every, environment=environment)

    return make


def test_one_pair_has_a_gap_and_no_verdict(pair):
    result = compared(*pair())
    (c,) = result["comparisons"]
    assert (c["candidate"], c["baseline"], c["paired"]) == ("rmsnorm-pre", "layernorm-pre", True)
    assert result["differs"] == {"model.norm.kind": ["layernorm", "rmsnorm"]}
    assert c["gap"]["gap"] == pytest.approx(0.03)
    assert c["gap"]["interval"] == pytest.approx((0.03, 0.03))
    assert (c["gap"]["n_steps"], c["gap"]["over"], c["gap"]["overlap"]) == (900, "steps", 0.0)
    assert c["final"]["difference"] == pytest.approx(0.03)
    assert c["verdict"] == stats.UNDECIDED
    assert "No verdict from one seed" in words(result)
    assert "no seed noise measured" in words(result)


def test_three_seeds_have_a_verdict_over_the_pairs(tmp_path):
    result = compared(*write_sweep(tmp_path))
    (c,) = result["comparisons"]
    assert [v["label"] for v in result["variants"]] == ["layernorm-pre", "rmsnorm-pre"]
    assert (c["n_seeds"], c["paired"], c["gap"]["over"]) == ([3, 3], True, "seeds")
    d = np.subtract(c["final"]["candidate"], c["final"]["baseline"])
    half = 2.91998558 * d.std(ddof=1) / np.sqrt(3)  # t, 2 degrees of freedom, 95 %
    assert c["final"]["interval"] == pytest.approx((d.mean() - half, d.mean() + half), abs=5e-5)
    assert 0 <= c["overlap"] <= 1
    assert 0 <= c["overlap_paired"] <= c["overlap"]
    assert "over 3 seeds the final validation loss differs" in verdict_sentence(c, result["unit"])
    wide = compared(*write_sweep(tmp_path), margin=1.0)["comparisons"][0]
    assert (wide["verdict"], wide["more_seeds"]) == (stats.EQUIVALENT, None)
    narrow = compared(*write_sweep(tmp_path), margin=1e-4)["comparisons"][0]
    assert narrow["verdict"] == stats.UNDECIDED
    assert "would settle it" in verdict_sentence(narrow, result["unit"])


def test_each_variant_is_compared_with_those_one_setting_away(tmp_path):
    result = compared(*write_sweep(tmp_path, placements=("pre", "post")))
    said = [(c["candidate"], c["baseline"]) for c in result["comparisons"]]
    assert said == [
        ("rmsnorm-pre", "layernorm-pre"),
        ("layernorm-post", "layernorm-pre"),
        ("rmsnorm-post", "rmsnorm-pre"),
        ("rmsnorm-post", "layernorm-post"),
    ]
    assert all(len(c["differs"]) == 1 for c in result["comparisons"])
    different = [c["baseline"] for c in result["comparisons"] if c["verdict"] == stats.DIFFERENT]
    assert different == ["layernorm-pre", "rmsnorm-pre"]  # post lies 0.05 above
    for norm, placement in (("rmsnorm", "post"), ("rmsnorm", "pre"), ("layernorm", "pre")):
        folders = write_sweep(tmp_path, placements=("pre", "post"))
        ours = tmp_path / f"{norm}-{placement}-s2"  # others of its kind come first
        last = compared(*(f for f in folders if f != ours), ours, last_only=True)
        assert [c["candidate"] for c in last["comparisons"]] == [f"{norm}-{placement}"] * 2
        assert last["comparisons"][0]["n_seeds"] == [3, 3]


def test_other_settings_are_found_and_named(pair):
    result = compared(*pair(optim__lr=3e-4, model__n_layer=6))
    assert result["differs"] == {
        "model.norm.kind": ["layernorm", "rmsnorm"],
        "model.n_layer": [4, 6],
        "optim.lr": [1e-3, 3e-4],
    }
    assert [v["label"] for v in result["variants"]][1] == "rmsnorm-pre, n_layer=6, lr=0.0003"


def test_seeds_alone_are_the_noise(tmp_path):
    a, b = (write_run(tmp_path / str(s), config(seed=s), curve(1000, noise=0.01, seed=s)) for s in (1, 2))
    result = compared(a, b)
    (c,) = result["comparisons"]
    assert c["noise"]
    assert c["paired"]
    assert (c["candidate"], c["baseline"]) == ("layernorm-pre, seed=2", "layernorm-pre, seed=1")
    assert "from other initial weights" in c["pairing"]
    assert "This is noise" in words(result)


def test_other_batches_are_compared_unpaired_and_said_to_be(pair):
    other = ENVIRONMENT | {"batch_hashes": BATCHES | {"1": "else"}}
    (c,) = compared(*pair(environment=other))["comparisons"]
    assert not c["paired"]
    assert "other batches: unpaired" in c["pairing"]
    assert c["gap"]["gap"] == pytest.approx(0.03)


def test_seeds_of_which_none_match_are_compared_unpaired(tmp_path):
    a = [write_run(tmp_path / f"a{s}", config(seed=s), curve(1000, seed=s, noise=0.01)) for s in (1, 2, 3)]
    b = [write_run(tmp_path / f"b{s}", config("rmsnorm", seed=s), curve(1000, seed=s, noise=0.01)) for s in (4, 5)]
    (c,) = compared(*a, *b)["comparisons"]
    assert not c["paired"]
    assert c["n_seeds"] == [3, 2]
    assert "unpaired" in c["pairing"]
    assert "overlap_paired" not in c
    assert "over 3 and 2 seeds" in verdict_sentence(c, "nats/token")


def test_the_same_run_twice_is_no_second_seed(tmp_path):
    a, b = (write_run(tmp_path / name, config(), curve(300)) for name in "ab")
    with pytest.raises(UserError, match="two runs that differ"):
        compare([load_run(a), load_run(b)])
    c = write_run(tmp_path / "c", config("rmsnorm"), curve(300))
    beside = ENVIRONMENT | {"lockstep": ["b", "c"]}
    (b / "environment.json").write_text(json.dumps(beside))
    result = compared(a, b, c)
    assert result["notes"] == ["b has the settings and seeds of another run, and counts no second time"]
    assert result["comparisons"][0]["n_seeds"] == [1, 1]


def test_the_same_run_of_two_commits_compares_the_code(tmp_path):
    environments = [ENVIRONMENT | {"git_commit": commit} for commit in ("aaa", "bbb")]
    a, b = (write_run(tmp_path / e["git_commit"], config(), curve(300), environment=e) for e in environments)
    result = compared(a, b)
    assert result["differs"] == {"environment.commit": ["aaa", "bbb"]}
    c = write_run(tmp_path / "c", config("rmsnorm"), curve(300, offset=0.03), environment=environments[1])
    result = compared(a, b, c)  # the same seed twice is no spread
    assert "different commits" in str(result["notes"])
    assert result["comparisons"][0]["n_seeds"] == [1, 1]
    assert "No verdict from one seed" in words(result)


def test_the_run_that_was_just_trained_counts_before_an_older_equal_one(tmp_path):
    old, other = (
        write_run(tmp_path / "old", config(), curve(300)),
        write_run(tmp_path / "b", config("rmsnorm"), curve(300)),
    )
    new = write_run(tmp_path / "new", config(compare__margin=0.5), curve(300))
    result = compared(old, other, new, last_only=True)
    assert result["margin"] == 0.5
    assert [run["name"] for run in result["variants"][-1]["runs"]] == ["new"]
    assert "old has the settings and seeds of another run" in result["notes"][0]


def test_runs_of_other_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    gpt2 = ENVIRONMENT | {"data": {"tokenizer": {"kind": "gpt2", "sha256": "f0"}}, "batch_hashes": {"0": "other"}}
    a = write_run(tmp_path / "a", config(), curve(1000))
    cfg = config(data__tokenizer="gpt2")
    b = write_run(tmp_path / "b", cfg, 4 * curve(1000, offset=0.02), environment=gpt2, bytes_per_token=4.0)
    result = compared(a, b)
    (c,) = result["comparisons"]
    assert result["unit"] == "bits/byte"
    assert c["final"]["difference"] == pytest.approx(0.02 / np.log(2), abs=1e-4)
    assert c["gap"]["gap"] == pytest.approx(0.02 / np.log(2), abs=1e-4)
    assert c["margin"] == pytest.approx(0.01 / np.log(2) / 4)  # by the tokenizer of the longest tokens,
    (back,) = compared(b, a)["comparisons"]  # whichever comes first
    assert back["margin"] == c["margin"]
    assert back["gap"]["gap"] == pytest.approx(-c["gap"]["gap"])
    assert any("tokenizers differ" in note for note in result["notes"])
    assert "bits/byte" in words(result)


def test_runs_of_different_length_are_compared_over_the_common_range(pair):
    a, b = pair(loss=curve(1000, offset=0.03)[:450])
    (b / "summary.json").unlink()
    result = compared(a, b)
    (c,) = result["comparisons"]
    assert c["steps"] == [101, 450]
    assert c["final"]["step"] == 400
    assert "b is unfinished at step 450" in result["notes"]
    assert "validation loss at step 400, the last in common" in words(result)
    assert "at step 400" in markdown(result).split("```")[0]


def test_steps_of_another_number_of_tokens_are_compared_by_tokens(pair):
    result = compared(*pair(train__batch_size=32, eval_every=50))
    (c,) = result["comparisons"]
    assert c["gap"] is None
    assert "another number of tokens" in words(result)
    assert (c["final"]["step"], c["final"]["is_end"]) == (1000, False)
    assert len(c["final"]["candidate"]) == 1


def test_a_diverged_run_is_said_to_be_in_every_output(pair):
    loss = curve(1000, offset=0.03)
    loss[499:] = np.nan
    a, b = pair(loss=loss[:500])
    (b / "summary.json").write_text(json.dumps({"status": "diverged", "step": 500}))
    result = compared(a, b)
    (c,) = result["comparisons"]
    assert c["verdict"] == "diverged"
    for output in (words(result), markdown(result), str(variant_rows(result)), verdict_sentence(c, "nats/token")):
        assert "diverged at step 500" in output
    assert c["gap"]["gap"] == pytest.approx(0.03)


def test_one_diverged_seed_of_three_leaves_no_verdict(tmp_path):
    folders = write_sweep(tmp_path)
    cfg, loss = config("rmsnorm", seed=3, data_seed=3), curve(1000)
    loss[200:] = np.nan
    write_run(folders[-1], cfg, loss[:201], status="diverged")
    (c,) = compared(*folders)["comparisons"]
    assert c["verdict"] == "diverged"
    assert c["n_seeds"] == [2, 2]  # those that were left
    assert "diverged at step 201" in verdict_sentence(c, "nats/token")


def test_a_hole_in_a_curve_is_left_out(pair):
    loss = curve(1000, offset=0.03)
    a, b = pair(loss=loss)
    lines = (a / "metrics.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"step": 700,' in line and "val/loss" in line)
    record = json.loads(lines[at]) | {"val/loss": None}
    (a / "metrics.jsonl").write_text("\n".join([*lines[:at], json.dumps(record), *lines[at + 1 :]]) + "\n")
    (c,) = compared(a, b)["comparisons"]
    assert c["final"]["difference"] == pytest.approx(0.03)
    assert not c["diverged"]


def test_a_step_without_a_loss_is_left_out_and_said_and_no_divergence(pair):
    loss = curve(1000, offset=0.03)
    loss[500] = np.nan
    result = compared(*pair(loss=loss))
    (c,) = result["comparisons"]
    assert (c["gap"]["n_steps"], c["diverged"]) == (899, [])
    assert "b has no finite loss at 1 of its steps, which are left out" in result["notes"]


def test_what_diverged_at_once_has_no_gap_and_its_partner_is_not_missing(tmp_path):
    folders = write_sweep(tmp_path, seeds=(1, 2))
    for seed, folder in enumerate(folders[2:], 1):
        loss = curve(1000)
        loss[105:] = np.nan
        write_run(folder, config("rmsnorm", seed=seed, data_seed=seed), loss[:106], status="diverged")
    (c,) = compared(*folders)["comparisons"]
    assert (c["gap"], c["alone"], c["verdict"]) == (None, [], "diverged")
    assert c["why_no_gap"] == "diverged before there was a curve to compare"


def test_other_validation_texts_have_no_verdict(tmp_path):
    other = ENVIRONMENT | {"data": ENVIRONMENT["data"] | {"corpus_sha256": "another"}, "batch_hashes": {"0": "x"}}
    folders = [
        write_run(
            tmp_path / f"{name}{seed}", config(seed=seed), curve(300, noise=0.01, seed=seed), environment=environment
        )
        for name, environment in (("a", ENVIRONMENT), ("b", other))
        for seed in (1, 2)
    ]
    (c,) = compared(*folders)["comparisons"]
    assert (c["verdict"], c["final"]) == (None, None)
    assert "the runs validate on different texts" in verdict_sentence(c, "nats/token")


def test_a_run_that_recorded_nothing_has_no_curves_to_compare(pair):
    a, b = pair()
    (b / "metrics.jsonl").write_text("")
    (c,) = compared(a, b)["comparisons"]
    assert (c["gap"], c["final"], c["step_time_ratio"]["ratio"]) == (None, None, None)


def test_nothing_after_warmup(pair):
    a, b = pair(loss=curve(1000)[:60])
    (c,) = compared(a, b)["comparisons"]
    assert c["why_no_gap"] == "no step after the learning rate's warm-up to compare losses in"


def test_a_short_seed_is_left_out_and_does_not_shorten_the_others(tmp_path):
    folders = write_sweep(tmp_path)
    write_run(folders[-1], config("rmsnorm", seed=3, data_seed=3), curve(30), status="interrupted")
    result = compared(*folders)
    (c,) = result["comparisons"]
    assert (c["n_seeds"], c["final"]["step"], c["final"]["is_end"]) == ([2, 2], 1000, True)
    assert c["alone"] == ["layernorm-pre-s3"]
    assert f"{folders[-1].name} is interrupted at step 30, and is left out" in result["notes"]
    assert "without a partner, and left out: layernorm-pre-s3" in words(result)
    header, (_, row) = variant_rows(result)
    assert row[header.index("seeds")] == "2 of 3"
    assert "1.39" in row[2]


def test_no_verdict_comes_from_before_the_end_of_the_warmup(tmp_path):
    folders = write_sweep(tmp_path, steps=90)
    (c,) = compared(*folders, margin=5.0)["comparisons"]
    assert (c["verdict"], c["final"]) == (None, None)
    assert "no evaluation after the learning rate's warm-up" in words(compared(*folders))


def test_seeds_without_an_evaluation_after_warmup_still_measure_noise(tmp_path):
    result = compared(*write_sweep(tmp_path, steps=150, eval_every=1000))
    assert "no seed noise measured" not in words(result)
    assert "over 3 seeds), mean over the last half" in words(result)


def test_unequal_numbers_of_seeds_are_said_as_they_are(tmp_path):
    a = [write_run(tmp_path / f"a{s}", config(seed=s), curve(1000, seed=s, noise=0.01)) for s in (1, 2, 3)]
    b = [write_run(tmp_path / f"b{s}", config("rmsnorm", seed=s), curve(1000, seed=s, noise=0.01)) for s in (4, 5)]
    assert words(compared(*a, *b)).count("over 3 and 2 seeds") == 2


def test_pairs_that_share_their_batches_are_said_not_to_be_independent(tmp_path):
    folders = [
        write_run(tmp_path / f"{norm}{seed}", config(norm, seed=seed), curve(300))
        for norm in ("layernorm", "rmsnorm")
        for seed in (1, 2)
    ]
    assert "data_seed repeat, so the pairs are not independent" in words(compared(*folders))
    assert "independent" not in words(compared(*write_sweep(tmp_path / "sweep")))


def test_a_missing_record_is_not_another_setting(tmp_path):
    a, b = write_run(tmp_path / "a", config(), curve(300)), write_run(tmp_path / "b", config("rmsnorm"), curve(300))
    (b / "environment.json").write_text('{"data": null}')
    result = compared(a, b)
    assert result["differs"] == {"model.norm.kind": ["layernorm", "rmsnorm"]}
    assert result["unit"] == "nats/token"
    assert "batches not on record: unpaired" in words(result)
    assert "unpaired" in markdown(result)


def test_a_run_that_diverged_before_its_first_step(tmp_path):
    a, b = write_run(tmp_path / "a", config(), curve(300)), write_run(tmp_path / "b", config("rmsnorm"), curve(300))
    (b / "metrics.jsonl").write_text("")
    (b / "summary.json").write_text('{"status": "diverged"}')
    assert "No verdict: b diverged at step 0." in words(compared(a, b))


def test_runs_from_before_there_was_a_margin(tmp_path):
    cfg = config()
    del cfg["compare"]
    a, b = (
        write_run(tmp_path / "a", cfg, curve(300)),
        write_run(tmp_path / "b", config("rmsnorm", compare=None), curve(300)),
    )
    assert compared(a, b)["margin"] == 0.01


# times


def test_twins_of_which_one_was_trained_again_are_separate_runs(tmp_path):
    a, b = timed(tmp_path)
    (b / "environment.json").write_text((b / "environment.json").read_text().replace("2026-01-01T01", "2026-01-03"))
    (b / "summary.json").write_text('{"status": "finished", "ended": "2026-01-04"}')
    assert compared(a, b)["comparisons"][0]["step_time_ratio"]["how"] == "separate runs"


def timed(tmp_path, *, seeds=(1,), lockstep=True, waits=None, **changes) -> list[Path]:
    """Twins of 10 and 11 ms a step."""
    folders = []
    for seed in seeds:
        names = [f"ln{seed}", f"rms{seed}"]
        for name, norm, ms in zip(names, ("layernorm", "rmsnorm"), (10.0, 11.0), strict=True):
            environment = ENVIRONMENT | {"started": f"2026-01-01T0{seed}", "lockstep": names if lockstep else []}
            environment |= changes if norm == "rmsnorm" else {}
            folder = write_run(
                tmp_path / name, config(norm, seed=seed), curve(600), step_ms=ms, waits=waits, environment=environment
            )
            ended = {"status": "finished", "ended": f"2026-01-01T0{seed + 1}"}
            (folder / "summary.json").write_text(json.dumps(ended))
            folders.append(folder)
    return folders


def test_the_ratio_of_twins_is_that_of_interleaved_steps(tmp_path):
    times = compared(*timed(tmp_path))["comparisons"][0]["step_time_ratio"]
    assert times["ratio"] == pytest.approx(1.1, rel=0.02)
    assert times["interval"][0] <= 1.1 <= times["interval"][1]
    assert (times["how"], times["each"], times["disturbed"]) == ("interleaved", [], 0)
    assert "In this process, in these minutes" in words(compared(*timed(tmp_path)))


def test_steps_beside_a_busy_process_do_not_count_in_the_ratio(tmp_path):
    waits = np.where(np.arange(600) % 100 < 60, 0.02, 0.008)
    result = compared(*timed(tmp_path, waits=waits))
    times = result["comparisons"][0]["step_time_ratio"]
    assert times["ratio"] == pytest.approx(1.1, rel=0.02)
    assert times["disturbed"] == 2 * 350  # of both; the first ten warm up
    assert "steps left out   700, when another process had the cores" in words(result)
    assert result["variants"][0]["runs"][0]["time/step_ms"] > 20  # as long as they were


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_machine_that_was_busy_all_the_time_gives_no_ratio(tmp_path, lockstep):
    a, b = timed(tmp_path, waits=np.full(600, 0.4), lockstep=lockstep)
    if not lockstep:
        (a / "summary.json").write_text('{"status": "finished", "ended": "2026-01-01T01"}')
    times = compared(a, b)["comparisons"][0]["step_time_ratio"]
    why = "too few timed steps, for another process had the cores: leave it one by OMP_NUM_THREADS"
    assert (times["ratio"], times["why"]) == (None, why)


def crowded(tmp_path, *, seeds=(1,), ratio=1.2) -> list[Path]:
    """Twins whose steps do not count, with 120 more of each by one thread."""
    folders = timed(tmp_path, seeds=seeds, waits=np.full(600, 0.4))
    rng = np.random.default_rng(0)
    for folder in folders:
        ms = 20 * np.exp(rng.standard_normal(120) * 0.02) * (ratio if folder.name.startswith("rms") else 1)
        (folder / "one_thread.json").write_text(json.dumps({"step_ms": ms.tolist()}))
    return folders


def test_a_busy_machine_has_the_ratio_of_further_steps_and_it_is_said(tmp_path):
    result = compared(*crowded(tmp_path))
    (c,) = result["comparisons"]
    times = c["step_time_ratio"]
    assert times["ratio"] == pytest.approx(1.2, rel=0.01)
    assert times["interval"][0] < 1.2 < times["interval"][1]
    assert times["how"] == "one thread"
    assert "for another process had the cores" in why_times_differ(result)  # of the trained steps, in the figures
    assert c["to_loss"]["steps"]
    assert c["to_loss"]["seconds"] is None
    assert "further steps by one thread, interleaved, in CPU time\n  steps left out   1180" in words(result)
    assert comparison_rows(result)[1][0][-1].endswith(", by one thread")
    result = compared(*crowded(tmp_path / "seeds", seeds=(1, 2, 3)))
    times = result["comparisons"][0]["step_time_ratio"]
    assert (times["how"], len(times["each"])) == ("one thread", 3)
    assert times["ratio"] == pytest.approx(1.2, rel=0.01)
    assert "over 3 pairs, further steps by one thread, interleaved, in CPU time: 1." in words(result)


def test_further_steps_and_trained_ones_give_no_ratio_together(tmp_path):
    mixed = timed(tmp_path, seeds=(1, 2)) + crowded(tmp_path, seeds=(3,))
    times = compared(*mixed)["comparisons"][0]["step_time_ratio"]
    assert (times["ratio"], times["why"][:20]) == (None, "too few timed steps,")


def test_undisturbed_steps_go_before_further_ones(tmp_path):
    folders = timed(tmp_path)
    for folder in folders:
        (folder / "one_thread.json").write_text(json.dumps({"step_ms": [20.0] * 120}))
    times = compared(*folders)["comparisons"][0]["step_time_ratio"]
    assert times["how"] == "interleaved"
    assert "why" not in times


@pytest.mark.parametrize("text", ["", "[]", '{"step_ms": 3}', '{"step_ms": ["a"]}', '{"step_ms": [1.0]}', "{"])
def test_damaged_or_few_further_steps_are_none(tmp_path, text):
    a, b = crowded(tmp_path)
    (b / "one_thread.json").write_text(text)
    assert compared(a, b)["comparisons"][0]["step_time_ratio"]["ratio"] is None


def test_the_ratio_of_several_pairs_is_over_the_pairs(tmp_path):
    result = compared(*timed(tmp_path, seeds=(1, 2, 3)))
    times = result["comparisons"][0]["step_time_ratio"]
    assert times["interval"][0] <= 1.1 <= times["interval"][1]
    assert (times["how"], len(times["each"])) == ("interleaved", 3)
    assert "over 3 pairs, steps interleaved: 1." in words(result)


def test_each_candidate_is_timed_against_the_twin_beside_it(tmp_path):
    """Two candidates, each in lockstep with a baseline of its own; the baselines are equal, and one of them counts."""
    folders = []
    for hour, (norm, ms) in enumerate([("rmsnorm", 11.0), ("dyt", 12.0)]):
        names = [f"ln-beside-{norm}", norm]
        environment = ENVIRONMENT | {"started": f"2026-01-01T{hour:02}", "lockstep": names}
        for name, kind, step_ms in zip(names, ("layernorm", norm), (10.0, ms), strict=True):
            folder = write_run(tmp_path / name, config(kind), curve(600), step_ms=step_ms, environment=environment)
            folders.append(folder)
    result = compared(*folders)
    times = {c["candidate"]: c["step_time_ratio"] for c in result["comparisons"]}
    assert {time["how"] for time in times.values()} == {"interleaved"}
    assert times["rmsnorm-pre"]["ratio"] == pytest.approx(1.1, rel=0.02)
    assert times["dyt-pre"]["ratio"] == pytest.approx(1.2, rel=0.02)


def test_separate_runs_have_a_ratio_without_interval_and_it_is_said(tmp_path):
    a, b = timed(tmp_path, lockstep=False, started="2026-01-02")
    (b / "summary.json").write_text(json.dumps({"status": "finished", "ended": "2026-01-03"}))
    result = compared(a, b)
    times = result["comparisons"][0]["step_time_ratio"]
    assert times["ratio"] == pytest.approx(1.1, rel=0.02)
    assert (times["how"], times["interval"]) == ("separate runs", None)
    assert "the machine's drift is in it" in words(result)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "another", "started": "2026-01-02"}, "another machine"),
        ({"threads": 1, "started": "2026-01-02"}, "another threads"),
        ({"openmp": {"OMP_WAIT_POLICY": "PASSIVE"}, "started": "2026-01-02"}, "another openmp"),
        ({"machine": None, "started": "2026-01-02"}, "the machine is not on record"),
        ({"before": [ENVIRONMENT | {"machine": "a laptop"}], "started": "2026-01-02"}, "another machine"),
        ({"before": ["damaged"], "started": "2026-01-02"}, "the machine is not on record"),
        ({"started": None}, "when the runs began and ended is not on record"),
        ({"versions": {"torch": "2.11.0"}, "started": "2026-01-02"}, "another version of"),
        ({}, "beside each other"),
    ],
)
def test_times_that_cannot_be_compared_are_not(tmp_path, changes, why):
    result = compared(*timed(tmp_path, lockstep=False, **changes))
    times = result["comparisons"][0]["step_time_ratio"]
    assert times["ratio"] is None
    assert why in times["why"]
    assert result["comparisons"][0]["to_loss"]["seconds"] is None
    assert "not measured" in words(result)


def test_steps_and_seconds_to_the_same_loss(tmp_path):
    a = write_run(tmp_path / "a", config(), np.linspace(3, 2, 1001)[1:], eval_every=100)
    slow = np.linspace(3, 1, 2001)[1:1001]  # the same line, reached at the same step: no ratio but 1
    b = write_run(tmp_path / "b", config("rmsnorm"), slow, step_ms=20.0)
    (c,) = compared(a, b)["comparisons"]
    assert c["to_loss"]["steps"] == {"ratio": pytest.approx(1.0), "interval": None}
    fast = np.linspace(3, 1, 1001)[1:]  # twice as steep
    b = write_run(tmp_path / "b", config("rmsnorm"), fast, step_ms=10.0)
    (c,) = compared(a, b)["comparisons"]
    assert c["to_loss"]["steps"]["ratio"] == pytest.approx(0.5, abs=0.01)
    assert c["to_loss"]["seconds"] is None  # when they ran is not on record


# siblings


def test_siblings_differ_in_one_of_norm_and_placement(tmp_path):
    def run(name, *args, status="finished", **kwargs):
        return write_run(tmp_path / name, config(*args, **kwargs), curve(20), status=status)

    ours = run("ours", "rmsnorm", "pre")
    assert siblings(ours) == []
    run("both", "layernorm", "post")
    run("same", "rmsnorm", "pre")
    run("unfinished", "layernorm", "pre", status="interrupted")
    run("seed", "layernorm", "pre", seed=2)
    run("lr", "layernorm", "pre", optim__lr=1.0)
    assert siblings(ours) == []  # none of the same seed
    norm, placement = run("norm", "layernorm", "pre"), run("placement", "rmsnorm", "post")
    (tmp_path / "norm" / "metrics.jsonl").unlink()  # it is not read for this
    assert set(siblings(ours)) == {norm, placement, tmp_path / "seed", tmp_path / "same"}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("{")
    (tmp_path / "broken" / "summary.json").write_text('{"status": "finished"}')
    assert norm in siblings(ours)
