"""The benchmark of Ray tells its own time from that of Ray's workers."""

from bench.ray import ReplicaTimes, split_replica_times

WORKERS = [
    {"pid": 1, "worker_type": "WORKER", "worker_launched_time_ms": 90_000, "start_time_ms": 91_000},
    {"pid": 2, "worker_type": "WORKER", "worker_launched_time_ms": 101_000, "start_time_ms": 102_500},
    {"pid": 3, "worker_type": "WORKER", "worker_launched_time_ms": 101_250, "start_time_ms": 102_000},
    {"pid": 2, "worker_type": "DRIVER", "worker_launched_time_ms": 190_000, "start_time_ms": 190_000},
]


def test_the_time_of_a_scaling_is_split_by_the_last_of_the_new_workers():
    found = split_replica_times("serve", {2, 3}, begun_s=100.0, target_s=100.5, running_s=103.0, workers=WORKERS)
    assert found == ReplicaTimes(mode="serve", target_s=0.5, launched_s=1.25, ready_s=2.5, running_s=3.0)


def test_a_worker_that_was_there_before_costs_nothing():
    found = split_replica_times("serve", {1}, begun_s=100.0, target_s=100.5, running_s=101.0, workers=WORKERS)
    assert (found.launched_s, found.ready_s) == (0.0, 0.0)
