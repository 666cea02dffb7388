"""The E3 bench: its judge on plans worked out by hand, its bounds, and a bounded run.

Where the published data is at hand (EELGRID_DATA) the known numbers must be met.
"""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from bench.llm.__main__ import main
from bench.llm.audit import Promise, audit
from bench.llm.bounds import lp_bound, whole_bound
from bench.llm.data import demands, own_trace, services
from bench.llm.plan import WindowPlan
from bench.llm.policies import POLICIES, case_of
from bench.llm.report import COLUMNS
from bench.llm.runs import penalties, pool_of

from eelgrid_controller.profiles.points import Configuration, Point

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
H, B = "h100-sxm5-80gb", "b200"
IDLE_W = {H: 70.0, B: 200.0}
SMALL, LARGE = Configuration(H, gpus=1, batch=0), Configuration(B, gpus=2, batch=0)
PROMISE = Promise(0.95, 0.05, 60.0, 30.0)


def _point(shape, batch, token_hz, p95_s, power_w):
    running = Configuration(shape.gpu_model, gpus=shape.gpus, batch=batch)
    return Point("m", running, token_hz, {0.95: p95_s, 0.5: p95_s / 2}, power_w)


POINTS = (
    _point(SMALL, 8, 100.0, 0.01, 300.0),
    _point(SMALL, 32, 300.0, 0.03, 450.0),
    _point(SMALL, 64, 500.0, 0.09, 500.0),  # breaks the objective
    _point(LARGE, 8, 150.0, 0.005, 700.0),
    _point(LARGE, 64, 900.0, 0.04, 1000.0),
)


def _judged(windows, demand_hz, pool=None, **changes):
    pool = {H: 8, B: 8} if pool is None else pool
    return audit(POINTS, PROMISE._replace(**changes), demand_hz, tuple(windows), pool=pool, idle_w=IDLE_W)


def test_the_accounts_of_a_plan():
    """Two small instances, of which one shares its window; then a large one more, then none."""
    plan = (
        WindowPlan({SMALL: 2}, ((0, 0.5), (1, 1.5))),
        WindowPlan({SMALL: 2, LARGE: 1}, ((1, 2.0), (4, 1.0))),
        WindowPlan({SMALL: 1}, ()),
    )
    found = _judged(plan, [500.0, 1500.0, 0.0])
    assert not found.violated.any()
    assert found.throughput_hz.tolist() == [500.0, 1500.0, 0.0]
    assert found.power_w.tolist() == [825.0, 1900.0, 0.0]
    starts_j = 30.0 * (2 * 300.0 + 700.0)
    assert found.start_j == starts_j
    assert found.starts == 3
    assert found.serving_j == pytest.approx(60.0 * (825.0 + 1900.0) + starts_j)
    assert found.above_idle_j == pytest.approx(found.serving_j - 60.0 * (2 * 70.0 + 2 * 70.0 + 2 * 200.0))
    assert found.undivided_j == pytest.approx(found.serving_j + 60.0 * 75.0)  # all of it at 450 W
    assert found.loaded_gpus[B].tolist() == [0, 2, 0]
    assert found.tokens == 60.0 * 2000.0


@pytest.mark.parametrize(
    ("window", "demand_hz", "why"),
    [
        (WindowPlan({SMALL: 1}, ((1, 1.0),)), 301.0, "too little throughput"),
        (WindowPlan({SMALL: 1}, ((2, 1.0),)), 100.0, "a point that breaks the objective"),
        (WindowPlan({SMALL: 1}, ((1, 2.0),)), 100.0, "more run than are loaded"),
        (WindowPlan({}, ((1, 1.0),)), 100.0, "nothing is loaded"),
        (WindowPlan({SMALL: 2}, ((1, 0.5),)), 100.0, "half an instance"),
        (WindowPlan({SMALL: 1}, ((1, 2.0), (0, -1.0))), 100.0, "less than nothing"),
        (WindowPlan({SMALL: 9}, ((1, 1.0),)), 100.0, "more than the pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_window_is_seen(window, demand_hz, why):
    good = WindowPlan({SMALL: 1}, ((1, 1.0),))
    assert _judged((good, window), [100.0, demand_hz]).violated.tolist() == [False, True], why


def test_half_an_instance_is_kept_where_it_may_idle():
    half = WindowPlan({SMALL: 2}, ((1, 0.5),))
    assert not _judged((half,), [100.0], may_idle=True).violated.any()


def test_a_plan_of_another_length_is_refused():
    with pytest.raises(ValueError, match="0 windows planned of 1"):
        _judged((), [1.0])


DEMANDS = np.array([200.0, 900.0, 0.0, 2500.0, 350.0, 1200.0])
POOL = {H: 40, B: 40}


@pytest.mark.parametrize("may_idle", [False, True])
def test_no_plan_passes_the_bounds_and_only_the_causal_breaks_a_promise(may_idle):
    promise = PROMISE._replace(may_idle=may_idle)
    case = case_of(POINTS, promise, POOL, IDLE_W)
    bound = lp_bound(POINTS, promise, DEMANDS, pool=POOL, idle_w=IDLE_W)
    whole_j = whole_bound(case.shapes, DEMANDS, POOL, 60.0)
    assert bound.violated == 0
    energies = {}
    for name, policy in POLICIES.items():
        found = audit(POINTS, promise, list(DEMANDS), policy(case, DEMANDS), pool=POOL, idle_w=IDLE_W)
        energies[name] = found.above_idle_j
        if name == "causal":
            assert found.violated[:1].sum() == 0  # it was told the mean
            continue
        assert not found.violated.any(), name
        assert found.above_idle_j >= bound.above_idle_j * (1 - 1e-9), name
        assert found.above_idle_j >= whole_j * (1 - 1e-9), name
    others = set(energies) - {"eelgrid", "causal"}
    assert all(energies["eelgrid"] <= energies[name] * (1 + 1e-9) for name in others)


def test_the_linear_bound_by_hand():
    """One shape, one point: demand over throughput, and a start for each rise."""
    points = (_point(SMALL, 8, 100.0, 0.01, 300.0),)
    found = lp_bound(points, PROMISE, np.array([50.0, 150.0, 100.0]), pool={H: 9}, idle_w=IDLE_W)
    assert found.above_idle_j == pytest.approx(60.0 * 230.0 * 3.0 + 1.5 * 30.0 * 300.0)
    short = lp_bound(points, PROMISE, np.array([50.0, 1000.0]), pool={H: 2}, idle_w=IDLE_W)
    assert short.violated == 1
    assert short.above_idle_j == pytest.approx(60.0 * 230.0 * 2.5 + 2.0 * 30.0 * 300.0)


def test_the_whole_bound_by_hand():
    """Windows for themselves, and the starts that the peak cannot do without."""
    points = (_point(SMALL, 8, 100.0, 0.01, 300.0),)
    case = case_of(points, PROMISE, {H: 9}, IDLE_W)
    found = whole_bound(case.shapes, np.array([50.0, 150.0]), {H: 9}, 60.0)
    assert found == pytest.approx(60.0 * 230.0 * 3 + 1.5 * 30.0 * 300.0)


def _entry(gpu, gpus, batch, token_hz, p95_ms, power_w):
    return {
        "gpu_model": gpu,
        "num_gpus": gpus,
        "max_num_seqs": batch,
        "model_id": "org/tiny",
        "tensor_parallel": gpus,
        "data_parallel": 1,
        "expert_parallel": 1,
        "output_throughput_tokens_per_sec": token_hz,
        "avg_power_watts": power_w,
        "median_itl_ms": p95_ms / 2,
        "p90_itl_ms": p95_ms * 0.9,
        "p95_itl_ms": p95_ms,
        "p99_itl_ms": p95_ms * 2,
    }


@pytest.fixture
def folder(tmp_path):
    """Data in the published format, small."""
    tasks, azure = tmp_path / "mlenergy" / "tasks", tmp_path / "azure_llm_2023"
    tasks.mkdir(parents=True)
    azure.mkdir()
    entries = [
        _entry("H100", 1, 8, 100.0, 10.0, 300.0),
        _entry("H100", 1, 64, 400.0, 45.0, 450.0),
        _entry("B200", 2, 8, 150.0, 8.0, 700.0),
        _entry("B200", 2, 256, 2000.0, 90.0, 1100.0),
    ]
    (tasks / "lm-arena-chat.json").write_text(json.dumps({"task": "lm-arena-chat", "configurations": entries}))
    images = [{"gpu_model": "H100", "batch_latency_s": 1.0}]
    (tasks / "text-to-image.json").write_text(json.dumps({"task": "text-to-image", "configurations": images}))
    for trace in ("conv", "code"):
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for second in range(0, 330, 10):
            at = f"2023-11-16 18:{15 + second // 60:02d}:{second % 60:02d}.1234560"
            lines.append(f"{at},100,{200 + 37 * second % 900}")
        (azure / f"AzureLLMInferenceTrace_{trace}.csv").write_text("\r\n".join(lines))
    return tmp_path


def test_the_formats_are_read(folder):
    (service,), read = services(folder)
    assert read == 5
    assert (service.task, service.model, own_trace(service)) == ("lm-arena-chat", "org/tiny", "conv")
    first = service.points[0]
    assert first.configuration == Configuration(H, gpus=1, batch=8, label="tp1 dp1 ep1")
    assert first.latency_s == {0.5: 0.005, 0.9: pytest.approx(0.009), 0.95: 0.01, 0.99: 0.02}
    found = demands(folder, "conv")
    assert len(found) == 5  # the sixth minute is not whole
    assert found[0] == pytest.approx(sum(200 + 37 * second % 900 for second in range(0, 60, 10)) / 60.0)


def test_the_pool_has_room_for_least_latency_on_either_model(folder):
    (service,), _ = services(folder)
    assert pool_of(service.points, 410.0) == {H: 5, B: 6}
    assert pool_of(service.points[:2], 410.0) == {H: 5, B: 0}


def test_a_bounded_run(folder, capsys):
    out = folder / "out"
    options = ["--data", str(folder), "--out", str(out), "--rates", "10", "--processes", "1", "--windows", "4"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "5 configurations, 4 with inter-token latency, of 1 services" in printed
    with (out / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    single = [row for row in rows if row["model"] == "org/tiny" and row["trace"] == "conv"]
    assert {row["policy"] for row in single} == set(POLICIES)
    assert {row["objective_ms"] for row in single} == {"20", "50", "100"}
    for row in single:
        assert float(row["energy_mj"]) > 0.0
        if row["policy"] != "causal":
            assert row["violated"] == "0", row
            assert float(row["gap_pct"]) >= 0.0, row
            assert float(row["gap_whole_pct"]) >= -1e-6, row
    fleet = [row for row in rows if row["model"] == "all" and row["trace"] == "own"]
    assert len(fleet) == 3 * len(POLICIES)
    assert {path.name for path in out.iterdir()} >= {"summary.csv", "penalties.csv", "fleet.png", "gaps.png"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "nowhere"], "mlenergy"),
        (["--models", "nobody"], "nobody"),
        (["--rates", "0"], "above 0"),
        (["--rates", "x"], "no list of numbers"),
        (["--policies", "best"], "eelgrid"),
        (["--traces", "none"], "conv"),
        (["--windows", "-1"], "negative"),
    ],
)
def test_what_cannot_be_done_is_reported(folder, options, says, capsys):
    asked = ["--data", str(folder), "--out", str(folder / "out"), "--processes", "1", *options]
    assert main(asked) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(not (DATA / "mlenergy").is_dir(), reason=f"no published data in {DATA}; set EELGRID_DATA")
def test_the_known_numbers_are_met():
    every, read = services(DATA)
    assert (read, len(every), sum(len(service.points) for service in every)) == (1858, 50, 838)
    found = penalties(every, (0.02, 0.05, 0.1))
    assert [round(one.median, 2) for one in found] == [1.74, 3.43, 5.63]
    assert [round(float(demands(DATA, trace).max())) for trace in ("conv", "code")] == [1492, 277]


@pytest.mark.skipif(not (DATA / "mlenergy").is_dir(), reason=f"no published data in {DATA}; set EELGRID_DATA")
def test_one_published_service_at_ten_times_the_rate(tmp_path):
    options = ["--data", str(DATA), "--out", str(tmp_path), "--models", "Llama-3.1-405B-Instruct-FP8"]
    assert main([*options, "--rates", "10", "--traces", "conv", "--processes", "1", "--no-plots"]) == 0
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] != "all"]
    ours = [row for row in rows if row["policy"] == "eelgrid"]
    assert len(ours) == 2  # nothing keeps 20 ms
    for row in ours:
        assert row["violated"] == row["bound_violated"] == "0"
        assert 0.0 <= float(row["gap_pct"]) <= 3.0
        same = [one for one in rows if one["objective_ms"] == row["objective_ms"] and one["policy"] != "causal"]
        assert all(float(row["energy_mj"]) <= float(one["energy_mj"]) + 1e-4 for one in same)
