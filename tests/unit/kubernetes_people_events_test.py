"""Events for people, as the API takes them."""

from datetime import UTC, datetime

from eelgrid_controller.engines.kubernetes.model.quantities import format_micro_time, format_time, parse_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference, build_event


def told(about, text="why", **changes):
    words = {"is_warning": True, "reason": "Why", "action": "Placing", "identity": "i", "now_ns": 1} | changes
    return build_event(about, text, **words)


def test_an_event_lies_beside_its_object_and_those_of_the_whole_cluster_in_default():
    pod = told(EventReference("v1", "Pod", "x", "p", "u"))
    assert pod["metadata"] == {"name": "p.1", "namespace": "x"}
    assert pod["regarding"] == {"apiVersion": "v1", "kind": "Pod", "namespace": "x", "name": "p", "uid": "u"}
    assert pod["type"] == "Warning"
    node = told(EventReference("v1", "Node", "", "n", "u"), is_warning=False)
    assert node["metadata"]["namespace"] == "default"
    assert "namespace" not in node["regarding"]
    assert node["type"] == "Normal"


def test_what_is_too_long_for_the_api_is_cut():
    found = told(EventReference("v1", "Pod", "x", "p" * 253, "u"), "t" * 5000, reason="R" * 300, identity="i" * 300)
    assert len(found["metadata"]["name"]) <= 253
    assert (len(found["note"]), len(found["reason"]), len(found["reportingInstance"])) == (1000, 128, 128)


def test_a_time_to_the_microsecond_loses_nothing():
    at_ns = 1_795_334_400_999_999_999
    assert format_micro_time(at_ns) == f"{format_time(at_ns // 10**9)[:-1]}.999999Z"
    assert datetime.fromisoformat(format_micro_time(at_ns)).astimezone(UTC).microsecond == 999_999
    assert parse_time(format_micro_time(at_ns)) == at_ns // 10**9
    assert format_micro_time(5_000) == "1970-01-01T00:00:00.000005Z"
