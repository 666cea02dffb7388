"""A wall clock that jumps: times are read anew, limits bind, and somebody hears of it."""

import json
import logging
from dataclasses import replace

import pytest
from tests.builders.cluster import build_node, build_request, build_spending_limit
from tests.builders.server import MemoryJournal, run_controller
from tests.unit.loop_test import looping

from eelgrid_controller.cli import doctor_cluster as checks
from eelgrid_controller.clock import FOLLOWED_S, Clock, WallClock
from eelgrid_controller.objectives.control_loop import MonotonicUnixClock
from eelgrid_controller.state.spending import GpuTime, judge_limits
from eelgrid_protos.messages import (
    ListWorkloadsRequest,
    SpendingPeriod,
    WorkloadPhase,
)

NOON_S = 1_795_348_800  # 22 November 2026, 12:00 UTC
NS = 10**9
HOUR = 3600 * NS
DECADE_S = 3_650 * 86_400


class Hands:
    """Two clocks, moved by hand."""

    def __init__(self):
        self.wall_s, self.monotonic_s = float(NOON_S), 100.0
        self.clock = Clock(now_ns=lambda: int(self.wall_s * NS), monotonic_s=lambda: self.monotonic_s)

    def pass_(self, seconds, *, jump_s=0.0):
        self.wall_s += seconds + jump_s
        self.monotonic_s += seconds


def wall(hands, caplog=None):
    return WallClock(hands.clock, log=logging.getLogger("test.clock"))


@pytest.mark.parametrize("jump_s", [DECADE_S, -DECADE_S, 3600.0, -2.0])
def test_a_jump_of_three_seconds_is_not_followed_and_reported(caplog, jump_s):
    hands = Hands()
    clock = wall(hands)
    with caplog.at_level(logging.WARNING):
        hands.pass_(5.0, jump_s=jump_s)
        for _ in range(3):
            assert clock.now_ns() == pytest.approx((NOON_S + hands.monotonic_s - 100.0) * NS, abs=1000)
            hands.pass_(1.0)
        hands.pass_(0.0, jump_s=-jump_s)
        assert clock.now_ns() == int(hands.wall_s * NS)
    assert (clock.jumps, clock.jump_s) == (1, pytest.approx(jump_s))
    assert f"jump_s={jump_s:.3f}" in caplog.text
    assert [one.levelname for one in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize("jump_s", [DECADE_S, -DECADE_S])
def test_a_jump_that_lasts_is_followed_both_ways(jump_s):
    hands = Hands()
    clock = wall(hands)
    for step_s in (jump_s, -jump_s):
        hands.pass_(1.0, jump_s=step_s)
        before_ns = clock.now_ns()
        hands.pass_(FOLLOWED_S - 1.0)
        assert abs(clock.now_ns() - before_ns) < 100 * NS
        hands.pass_(1.5)
        assert clock.now_ns() == int(hands.wall_s * NS)
    assert clock.jumps == 2


def test_a_clock_that_is_slewed_is_no_jump():
    hands = Hands()
    clock = wall(hands)
    for _ in range(1000):
        hands.pass_(1.0, jump_s=0.0005)
        assert clock.now_ns() == int(hands.wall_s * NS)
    assert clock.jumps == 0


def test_gpu_time_goes_on_with_its_period_when_a_clock_comes_back():
    found = GpuTime.start_period(SpendingPeriod.DAY, 0, NOON_S * NS)
    found.set_held("w", 2000)
    found.advance(NOON_S * NS + HOUR)
    found.advance((NOON_S + DECADE_S) * NS)  # something ended there
    assert found.spent_s(NOON_S * NS + 2 * HOUR) == 4 * 3600.0
    found = GpuTime.load(SpendingPeriod.DAY, json.loads(json.dumps(found.dump())))
    found.set_held("w", 2000)
    found.advance(NOON_S * NS + 3 * HOUR)
    assert found.spent_s(NOON_S * NS + 3 * HOUR) == 6 * 3600.0
    # Within the period: what was counted stays, and time goes on from there.
    found.advance(NOON_S * NS + 2 * HOUR)
    assert found.spent_s(NOON_S * NS + 3 * HOUR) == 8 * 3600.0
    # A checkpoint of before this was known has five figures.
    old = GpuTime.load(SpendingPeriod.DAY, found.dump()[:5])
    assert (old.total, old.before) == (found.total, None)


async def test_a_spending_limit_binds_after_a_clock_was_ten_years_ahead_for_a_moment():
    hands = Hands()
    journal = MemoryJournal()
    limit = build_spending_limit(2.0)

    async def judged(loop):
        await loop.command(
            lambda core, now_ns: core.set_exhausted_spending(
                judge_limits(core.state.policy, core.state.spending, {}, now_ns), now_ns=now_ns
            )
        )

    async with looping(journal, clock=hands.clock) as loop:
        await loop.register_node(build_node(gpus=4))
        await loop.update_policy(replace(loop.core.state.policy, spending=(limit,)))
        await loop.submit(build_request("first", gpus=1, namespace="research"))
        hands.pass_(60.0, jump_s=DECADE_S)
        await loop.submit(build_request("other", gpus=1, namespace="research"))
        await judged(loop)
        await loop.cancel("other")
        hands.pass_(3.0, jump_s=-DECADE_S)
        late = await loop.submit(build_request("late", gpus=1, namespace="else"))
        assert late.submitted_ns == int(hands.wall_s * NS)
        hands.pass_(7200.0)
        await judged(loop)
        assert len(loop.core.state.spending.over) == 1
        assert (await loop.submit(build_request("held", gpus=1, namespace="research"))).phase is WorkloadPhase.PENDING


async def test_a_listing_is_whole_page_by_page_whatever_the_clock_did(tmp_path):
    async with run_controller(tmp_path) as rig:
        times = iter([5, 4, 4, 9, 2, 7])
        rig.controller.loop.clock = Clock(now_ns=lambda: next(times, 10**9))
        for number in range(6):
            await rig.controller.loop.submit(build_request(f"w{number}"))
        found, token = [], ""
        while True:
            page = await rig.operators.list_workloads(ListWorkloadsRequest(page_size=2, page_token=token))
            found += [one.workload_id for one in page.workloads]
            token = page.next_page_token
            if not token:
                break
        assert found == ["w4", "w1", "w2", "w0", "w5", "w3"]


def test_what_leaves_the_steering_is_by_the_wall_clock():
    hands = Hands()
    steady = MonotonicUnixClock(hands.clock)
    assert steady.lead_s() == 0.0
    hands.pass_(5.0, jump_s=DECADE_S)
    assert steady.now_s() == hands.wall_s
    hands.pass_(5.0, jump_s=-DECADE_S)
    assert steady.lead_s() == pytest.approx(DECADE_S)
    assert steady.now_s() - steady.lead_s() == pytest.approx(hands.wall_s)


def test_the_doctor_reports_jumps():
    def findings(text):
        return [one.check for one in checks.check_clock_jumps(checks.parse_metrics(text))], checks.check_clock_jumps(
            checks.parse_metrics(text)
        )

    assert findings("")[0] == []
    names, (good,) = findings("eelgrid_clock_jumps_total 0\neelgrid_clock_jump_seconds 0\n")
    assert (names, good.status.name) == (["clock, jumps"], "OK")
    _, (warned,) = findings("eelgrid_clock_jumps_total 2\neelgrid_clock_jump_seconds -315360000\n")
    assert warned.status.name == "WARN"
    assert "-315,360,000.0 s" in warned.what
