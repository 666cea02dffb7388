"""From totals of jobs, and pages of replicas, to increments; and their cut at whole hours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.objectives.job_observer import JobWorkCounter
from eelgrid_controller.objectives.observation import ProgressReading
from eelgrid_controller.objectives.services.service_metrics import (
    SERVER_NAMES,
    ScrapePair,
    parse_exposition,
    served_increment,
)
from eelgrid_controller.state.measurements import WorkInterval, spread_work
from eelgrid_protos import codec
from eelgrid_protos.errors import InvalidMessage
from eelgrid_protos.messages import TrainingPromise

HOUR_S = 1_799_971_200


def counted(*told, placed_s=HOUR_S, unit=""):
    work = JobWorkCounter()
    work.retain({"j"}, HOUR_S - 10.0)
    return [work.count_increment("j", unit, one and ProgressReading(*one), placed_s) for one in told]


def test_totals_become_increments_from_the_first_that_is_seen():
    at = [HOUR_S + seconds for seconds in (60.0, 120.0, 180.0, 240.0)]
    found = counted(None, (at[0], 500.0), (at[0], 500.0), (at[1], 530.0), (at[2], 100.0), (at[3], 160.0))
    assert found == [
        None,
        WorkInterval("j", "work", 0.0, HOUR_S, at[0], is_whole=False),  # it may have begun at a checkpoint
        None,
        WorkInterval("j", "work", 30.0, at[0], at[1]),
        WorkInterval("j", "work", 0.0, at[1], at[2], is_whole=False),  # it went back to one
        WorkInterval("j", "work", 60.0, at[2], at[3]),
    ]


def test_steps_and_images_are_told_apart_by_what_the_job_says():
    told = ((HOUR_S + 60.0, 0.0), (HOUR_S + 120.0, 7.0))
    assert counted(*told, unit="image")[-1] == WorkInterval("j", "image", 7.0, HOUR_S + 60.0, HOUR_S + 120.0)
    assert counted(*told, unit="step")[-1].unit == "step"


@pytest.mark.parametrize(
    ("unit", "said"), [("Step", "lower-case word"), ("token", "write such as trained_token"), ("s" * 25, "24")]
)
def test_a_unit_that_cannot_be_one_is_refused(unit, said):
    with pytest.raises(InvalidMessage, match=said):
        codec.encode_message(TrainingPromise(slowdown_most=0.1, work_unit=unit))


def test_of_a_job_that_ran_before_the_control_loop_nothing_is_reported_until_the_second_total():
    at_s = HOUR_S + 60.0
    assert counted((at_s, 500.0), (at_s + 60.0, 520.0), placed_s=HOUR_S - 999.0) == [
        None,
        WorkInterval("j", "work", 20.0, at_s, at_s + 60.0),
    ]


@given(
    st.lists(st.tuples(st.floats(0.0, 9000.0), st.floats(0.0, 9000.0), st.floats(0.0, 1e6), st.booleans()), max_size=8)
)
def test_hours_add_up_to_the_increments_and_no_second_is_reported_twice(steps):
    until_s, at_s, entries, total = None, HOUR_S + 1000.0, [], 0.0
    begin_s = None
    for gap_s, length_s, amount, is_whole in steps:
        at_s += gap_s
        made = spread_work(WorkInterval("w", "request", amount, at_s, at_s + length_s, is_whole), until_s)
        begin_s = at_s if begin_s is None else begin_s
        at_s += length_s
        until_s, total, entries = made[-1].until_s, total + amount, entries + made
    assert sum(one.amount for one in entries) == pytest.approx(total)
    if steps:
        seconds = sum(one.counted_s + one.missed_s for one in entries)
        assert seconds == pytest.approx(until_s - begin_s, abs=1e-3)
    assert all(one.hour_s % 3600 == 0 and one.counted_s >= 0.0 and one.missed_s >= 0.0 for one in entries)


def page(at_s, finished, tokens, started=1):
    return parse_exposition(
        f'process_start_time_seconds {started}\nvllm:request_success_total{{model_name="m"}} {finished}\n'
        f'vllm:generation_tokens_total{{model_name="m"}} {tokens}\n',
        at_s,
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((10, 100), (15, 180), (5.0, 80.0, True)),
        ((10, 100), (4, 30), (4.0, 30.0, False)),
        ((10, 100), (12, 130, 2), (12.0, 130.0, False)),
    ],
    ids=["more", "fallen", "another process"],
)
def test_counters_of_a_server_are_what_they_gained(before, after, expected):
    assert (
        tuple(served_increment(SERVER_NAMES["vllm"], ScrapePair(page(0.0, *before), page(900.0, *after)), "m"))
        == expected
    )
