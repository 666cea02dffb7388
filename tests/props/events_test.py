"""Whatever event obeys its rules comes back from the journal's text as it was, and what breaks them is healed alike."""

import json
import typing
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import strategies

from eelgrid_controller.core.nodes import REPORTED_EPOCH_MOST
from eelgrid_controller.state import events
from eelgrid_controller.state.events import check_readable, event_from_plain, event_to_plain
from eelgrid_protos.messages import (
    ListWorkloadsResponse,
    NodePlan,
    ResourceRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import Identifier, Name, Text
from eelgrid_protos.schema import is_valid_message, omit_broken, repair_message, repair_text

RELAXED = settings(
    max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None
)
ANYTHING = st.text(st.characters(), max_size=300)


@pytest.mark.parametrize("cls", typing.get_args(events.Event), ids=lambda cls: cls.__name__)
@RELAXED
@given(data=st.data())
def test_an_event_that_obeys_comes_back_as_it_was(cls, data):
    event = data.draw(strategies.message(cls))
    if "explanation" in {entry.name for entry in fields(cls)}:
        # Rows of one shape, as the planner makes them; state/journal.py keeps no others.
        event = replace(event, explanation=())
    if isinstance(event, events.NodeJoined):
        # The core refuses higher ones; what an old journal has of them is healed when it is read.
        event = replace(event, plan_epoch=min(event.plan_epoch, REPORTED_EPOCH_MOST))
    # What a job says of its progress is shown and not kept, and a digest is compared; whoever makes the event leaves them out.
    if isinstance(event, events.AttemptStarted | events.AttemptEnded):
        event = replace(event, status=_kept(event.status))
    if isinstance(event, events.WorkloadCompleted):
        event = replace(event, recovered=tuple(replace(one, status=_kept(one.status)) for one in event.recovered))
    check_readable(event)
    kind, body = event_to_plain(event)
    text = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    assert event_from_plain(kind, json.loads(text)) == event


def _kept(status):
    return replace(status, progress=None, process_digest="")


@pytest.mark.parametrize("name", [Identifier, Name])
@given(raw=ANYTHING)
def test_a_repaired_name_obeys_and_is_the_same_each_time(name, raw):
    rule = name.__metadata__[0]
    assert isinstance(rule, Text)
    healed = repair_text(raw, rule)
    assert 0 < len(healed) <= rule.longest
    assert rule.pattern.fullmatch(healed)
    assert repair_text(raw, rule) == healed == repair_text(healed, rule)


@given(first=ANYTHING, second=ANYTHING)
def test_names_that_were_two_stay_two(first, second):
    rule = Identifier.__metadata__[0]
    if first != second:
        assert repair_text(first, rule) != repair_text(second, rule)


@given(raw=ANYTHING, key=ANYTHING)
def test_a_repaired_message_obeys(raw, key):
    spec = WorkloadSpec(name=raw, namespace=raw, labels={key: raw}, request=ResourceRequest(cpu_milli=10**12))
    workload = Workload(workload_id=raw, spec=spec, phase=WorkloadPhase.PENDING, reason=raw)
    assert is_valid_message(repair_message(workload))
    assert repair_message(repair_message(workload)) == repair_message(workload)


@RELAXED
@given(data=st.data(), raw=ANYTHING)
def test_an_answer_keeps_every_element_that_is_sound(data, raw):
    sound = data.draw(st.lists(strategies.message(Workload), max_size=3))
    broken = [replace(one, workload_id=f"{raw} ") for one in sound]
    mixed = [item for pair in zip(sound, broken, strict=True) for item in pair]
    salvaged = omit_broken(ListWorkloadsResponse(workloads=tuple(mixed)))
    assert salvaged.message == ListWorkloadsResponse(workloads=tuple(sound))
    assert salvaged.omitted == len(broken) == len(salvaged.reasons)


@RELAXED
@given(plan=strategies.message(NodePlan))
def test_a_plan_goes_without_the_assignment_that_is_broken(plan):
    broken = tuple(replace(one, workload_id="my job") for one in plan.assignments)
    salvaged = omit_broken(replace(plan, assignments=broken + plan.assignments))
    assert (salvaged.message, salvaged.omitted) == (plan, len(broken))


def test_nothing_is_left_of_an_answer_that_is_broken_itself():
    salvaged = omit_broken(NodePlan(node_name="my node", epoch=1, lease_s=1.0))
    assert (salvaged.message, salvaged.omitted) == (None, 1)
    assert "node_name" in str(salvaged.reasons[0])
