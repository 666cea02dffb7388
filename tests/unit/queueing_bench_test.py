"""The replay of Kueue's load: every workload starts, no cohort exceeds its quota, and little of it lies idle."""

import json

from bench.queueing.__main__ import main
from bench.queueing.kueue import QueueReplay, list_arrivals

LOAD = {
    "cohorts": 1,
    "queues_per_cohort": 2,
    "nominal_quota": 20,
    "borrowing_limit": 100,
    "unit_ms_per_queue": 10 * 200 + 2 * 20 * 1000,
    "bound_s": 2.1,
    "workloads": [
        {"cls": "small", "count_per_queue": 10, "creation_interval_ms": 100, "runtime_ms": 200, "priority": 50, "request": 1},
        {"cls": "large", "count_per_queue": 2, "creation_interval_ms": 300, "runtime_ms": 1000, "priority": 200, "request": 20},
    ],
    "published": {
        "wall_ms": 351_116.4,
        "usage_pct": 55.9,
        "avg_time_to_admission_ms": {"large": 16_501, "small": 215_468},
    },
}  # fmt: skip


def test_arrivals_come_in_the_order_of_their_creation():
    arrivals = list_arrivals(LOAD)
    assert len(arrivals) == 24
    assert arrivals[0][:3] == (100, "small-0-0-0", "queue-0-0")
    assert [time_ms for time_ms, *_ in arrivals] == sorted(time_ms for time_ms, *_ in arrivals)


def test_the_quota_binds_and_not_the_nodes():
    replay = QueueReplay(LOAD)
    for number in range(3):
        replay.submit(number, f"large-{number}", f"queue-0-{number % 2}", LOAD["workloads"][1])
    replay.check_quotas()
    assert replay.core.workload("large-2").reason == "quota: queue cohort-0 has too little cpu quota left"
    replay.end(1000, "large-0")
    assert replay.waits_ms["large"] == [0, 0, 998]


def test_the_whole_load_starts_and_is_written(tmp_path, capsys):
    (tmp_path / "kai_kueue.json").write_text(json.dumps({"kueue": {"baseline": LOAD}}))
    assert main(["kueue", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "24 of 24 started" in printed
    assert (tmp_path / "out" / "queueing.csv").read_text().startswith("metric,ours,kueue,bound")
