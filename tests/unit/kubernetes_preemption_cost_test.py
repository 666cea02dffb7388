"""What preempting a Workload of Kueue costs."""

import pytest

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import (
    InterruptibleWorkload,
    boost_patch,
    compute_boost,
    max_boost_of,
    parse_boost,
    parse_interruptible,
    read_boost,
)

HOUR = 3600.0


def test_a_node_hour_that_would_be_lost_is_half():
    assert compute_boost(InterruptibleWorkload(gpus=8, ran_s=HOUR), 100) == 50
    assert compute_boost(InterruptibleWorkload(gpus=8, ran_s=0.0), 100) == 0
    assert compute_boost(InterruptibleWorkload(gpus=0, ran_s=HOUR), 100) == 0
    assert compute_boost(InterruptibleWorkload(gpus=64, ran_s=9 * HOUR), 100) == 75
    assert compute_boost(InterruptibleWorkload(gpus=1024, ran_s=1e9), 100) <= 100


def test_who_saves_itself_loses_little():
    assert compute_boost(InterruptibleWorkload(gpus=8, ran_s=20 * HOUR, grace_s=60.0), 100) == 0
    assert compute_boost(InterruptibleWorkload(gpus=64, ran_s=20 * HOUR, grace_s=1_800.0), 100) == 75


def test_a_promise_that_bears_little_costs_more():
    run = {"gpus": 8, "ran_s": HOUR / 2}
    assert compute_boost(InterruptibleWorkload(**run), 100) == 25
    assert compute_boost(InterruptibleWorkload(**run, deadline_left_s=10 * HOUR), 100) == 25
    assert compute_boost(InterruptibleWorkload(**run, deadline_left_s=600.0), 100) == 50
    assert compute_boost(InterruptibleWorkload(**run, slowdown_most=0.05), 100) == 50
    assert compute_boost(InterruptibleWorkload(**run, slowdown_most=0.0), 100) == 50


def test_who_wastes_has_none_and_nobody_has_where_nothing_is_set():
    run = {"gpus": 64, "ran_s": 9 * HOUR}
    assert compute_boost(InterruptibleWorkload(**run, is_wasteful=True), 100, 75) == 0
    assert compute_boost(InterruptibleWorkload(**run), 0) == 0


def test_near_an_edge_it_stays():
    # A share of 0.5 is the edge between 25 and 50 of 100.
    just_above = InterruptibleWorkload(gpus=8, ran_s=HOUR * 1.05)
    just_below = InterruptibleWorkload(gpus=8, ran_s=HOUR * 0.95)
    for before in (25, 50):
        assert compute_boost(just_above, 100, before) == before
        assert compute_boost(just_below, 100, before) == before
    assert compute_boost(InterruptibleWorkload(gpus=8, ran_s=HOUR * 1.3), 100, 25) == 50


def test_it_is_written_a_few_times_in_a_life():
    now, writes = 0, 0
    for minute in range(10_000):
        new = compute_boost(InterruptibleWorkload(gpus=8, ran_s=60.0 * minute), 100, now)
        assert new >= now
        writes += new != now
        now = new
    assert writes <= 4


@pytest.mark.parametrize(
    ("text", "most"), [("100", 100), ("0", 0), ("", 0), ("-5", 0), ("1e3", 0), ("999999999", 1_000_000), ("9" * 50, 0)]
)
def test_a_queue_names_the_most(text, most):
    assert max_boost_of({"metadata": {"annotations": {well_known.ANNOTATION_PREEMPTION_BOOST: text}}}) == most
    assert max_boost_of({"metadata": {}}) == 0


def workload(*, managed="true", conditions=("Admitted",), notes=None, **annotations):
    template = {
        "metadata": {"labels": {well_known.LABEL_MANAGED: managed}, "annotations": annotations},
        "spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "4"}}}]},
    }
    since = [{"type": one, "status": "True", "lastTransitionTime": "1970-01-01T01:00:00Z"} for one in conditions]
    return {
        "metadata": {"name": "w", "uid": "u", "resourceVersion": "3", "annotations": notes or {}},
        "spec": {"podSets": [{"name": "main", "count": 2, "template": template}]},
        "status": {"conditions": since},
    }


def test_a_workload_is_read():
    notes = {
        well_known.ANNOTATION_SLOWDOWN: "5%",
        well_known.ANNOTATION_CHECKPOINT_GRACE: "90s",
        well_known.ANNOTATION_DEADLINE: "4h",
    }
    run = parse_interruptible(workload(**notes), now_s=2 * HOUR)
    assert run == InterruptibleWorkload(gpus=8, ran_s=HOUR, grace_s=90.0, deadline_left_s=3 * HOUR, slowdown_most=0.05)


def test_who_waits_was_evicted_is_done_or_did_not_opt_in_has_no_cost():
    for one in (
        workload(conditions=()),
        workload(conditions=("Admitted", "Evicted")),
        workload(conditions=("Admitted", "Finished")),
        workload(managed="false"),
    ):
        assert parse_interruptible(one, now_s=9 * HOUR) is None


@pytest.mark.parametrize(
    ("text", "value"), [("50", 50), ("", 0), ("²", 0), ("-1", 0), ("9" * 5000, 0), ("9" * 9, 10**6)]
)
def test_what_people_write_as_our_boost_is_none_or_a_number(text, value):
    assert read_boost(text) == value


def test_the_patch_says_whose_it_is_and_leaves_that_of_others():
    key, ours = well_known.KUEUE_PRIORITY_BOOST, well_known.ANNOTATION_PREEMPTION_BOOST
    body = boost_patch(workload(), 50)
    assert body["metadata"] == {"uid": "u", "resourceVersion": "3", "annotations": {key: "50", ours: "50"}}
    assert boost_patch(workload(), 0) is None
    mine = workload(notes={key: "50", ours: "50"})
    assert boost_patch(mine, 50) is None
    assert boost_patch(mine, 0)["metadata"]["annotations"] == {key: None, ours: None}
    for theirs in ({key: "7"}, {key: "7", ours: "50"}):
        assert parse_boost(workload(notes=theirs)).is_foreign
        assert boost_patch(workload(notes=theirs), 50) is None
