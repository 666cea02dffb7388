"""Random lives under power enforcement; the benchmark of the node lives thousands of them."""

from collections import Counter

from bench.power_schedules import Schedule

LIVES = 24


def test_no_life_breaks_a_promise_and_none_is_idle():
    did = Counter[str]()
    for seed in range(LIVES):
        schedule = Schedule(seed)
        schedule.run()
        did += schedule.did
    wanted = (
        "put back",
        "budget steps",
        "steps over budget",
        "gangs at rest",
        "fight",
        "SETTING_RESTORED",
        "SETTING_DRIFT",
        "GPU_LOST",
        "GPU_RETURNED",
        "LEASE_EXPIRED",
        "died",
    )
    assert [what for what in wanted if did[what] == 0] == []
