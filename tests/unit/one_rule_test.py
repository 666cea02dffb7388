"""One rule for each name: whatever a request may carry, every answer and entry that it flows into may carry."""

import typing
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from eelgrid_controller.state import events
from eelgrid_protos import rpc
from eelgrid_protos.messages import ResourceRequest, WorkloadSpec
from eelgrid_protos.quantities import Identifier, Label, Text
from eelgrid_protos.schema import ValueShape, fields_of, is_valid_message, list_violations

NAME = Identifier.__metadata__[0].pattern
LINE = Label.__metadata__[0].pattern

# Fields that share a name and nothing else, or whose value is looked up and never passed on.
APART = {
    # Filters.
    "ListGpusRequest",
    "ListNodesRequest",
    "ListPlansRequest",
    "ListWorkloadsRequest",
    "ListPointsRequest",
    # Looked up in the inventory before anything is done.
    "NodeEvent",
}
# By field: messages in which the word means something else.
OTHER_MEANING = {
    "model": {"MetricsSource"},
    "name": {
        "CostTerm",
        "EnergyExporter",
        "ConfirmEnergyExportRequest",
        "RemoveEnergyExporterRequest",
        "PowerBudget",
        "SpendingLimit",
    },
    "subject": {"WhoAmIResponse"},
    # Of work and its points; of MIG it is the name of a shape.
    "profile": {"GpuInstance", "Slice", "WantedInstance"},
    # Pools of a policy are those that an operator names; a node in a pool that none can be named is in none of these.
    "pool": {"PoolMode"},
}


def inside(cls: Any, seen: set[Any]) -> set[Any]:
    """A message class and those that it holds."""
    if cls not in seen:
        seen.add(cls)
        for entry in fields_of(cls):
            for shape in shapes(entry.shape):
                for held in (shape.type, *shape.choices) if shape.kind in ("message", "choice") else ():
                    if held is not None:
                        inside(held, seen)
    return seen


def shapes(shape: ValueShape) -> Iterator[ValueShape]:
    yield shape
    for part in (shape.item, shape.key):
        if part is not None:
            yield from shapes(part)


def texts(classes: set[Any]) -> dict[str, dict[str, Text]]:
    """Rules of text by field and message."""
    found: dict[str, dict[str, Text]] = defaultdict(dict)
    for cls in classes:
        for entry in fields_of(cls):
            for shape in shapes(entry.shape):
                if shape.kind == "str":
                    assert isinstance(shape.rule, Text), f"{cls.__name__}.{entry.name} has no rule"
                    found[entry.name][cls.__name__] = shape.rule
    return found


def fits(what: Text, into: Text) -> bool:
    """Whether every value that is there by one rule obeys the other; whether it must be there is a call's affair."""
    return what.longest <= into.longest and (
        into.pattern is None or what.pattern is into.pattern or (what.pattern is NAME and into.pattern is LINE)
    )


SERVICES = (rpc.OPERATOR_SERVICE, rpc.AGENT_SERVICE)
SAID: set[Any] = set()
SHOWN: set[Any] = set()
for _service in SERVICES:
    for _method in _service.methods:
        inside(_method.request, SAID)
        inside(_method.response, SHOWN)
for _event in typing.get_args(events.Event):
    inside(_event, SHOWN)
SOURCES, TARGETS = texts(SAID), texts(SHOWN)


@pytest.mark.parametrize("name", sorted(SOURCES.keys() & TARGETS.keys()))
def test_what_a_request_may_say_every_answer_may_repeat(name: str) -> None:
    other = OTHER_MEANING.get(name, set()) | APART
    wrong = [
        f"{source}.{name} does not fit into {target}.{name}"
        for source, what in SOURCES[name].items()
        for target, into in TARGETS[name].items()
        if source not in other and target not in other and not fits(what, into)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("SubmitWorkloadRequest", "workload_id"), ("Assignment", "workload_id")),
        (("SubmitWorkloadRequest", "workload_id"), ("GpuStatus", "workload_ids")),
        (("Gpu", "uuid"), ("Assignment", "gpu_uuids")),
        (("Gpu", "uuid"), ("GpuSetting", "gpu_uuid")),
        (("ComputeInstance", "uuid"), ("Assignment", "gpu_uuids")),
        (("Gpu", "model"), ("ModelSummary", "model")),
        (("Gpu", "model"), ("PricesQuoted", "scarce_models")),
        (("ResourceRequest", "gpu_models"), ("ClassFit", "gpu_models")),
        (("ResourceRequest", "gpu_models"), ("ClassRoom", "gpu_models")),
        (("Inventory", "node_name"), ("GpuStatus", "node_name")),
        (("WorkloadSpec", "name"), ("Resident", "name")),
        (("GpuInstance", "profile"), ("WantedInstance", "profile")),
        (("PowerBudget", "name"), ("PowerBudget", "name")),
    ],
)
def test_names_that_go_by_another_word_fit_as_well(source: tuple[str, str], target: tuple[str, str]) -> None:
    rule = {**SOURCES[source[1]], **TARGETS.get(source[1], {})}[source[0]]
    assert fits(rule, TARGETS[target[1]][target[0]])


def test_a_key_of_a_mapping_obeys_its_rule() -> None:
    request = ResourceRequest(cpu_milli=1)
    assert is_valid_message(WorkloadSpec(name="a", request=request, labels={"team": "x"}))
    broken = WorkloadSpec(name="a", request=request, labels={"te\nam": "x"})
    assert not is_valid_message(broken)
    (found,) = list_violations(broken)
    assert found.field.startswith("labels")
