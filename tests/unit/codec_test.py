"""The codec: every message survives the wire, every broken rule is named, newer versions are read."""

from dataclasses import is_dataclass, replace
from enum import IntEnum

import pytest

from eelgrid_protos import codec, messages
from eelgrid_protos.errors import InvalidMessage, MalformedMessage
from eelgrid_protos.messages import (
    Absence,
    AbsenceReason,
    Acknowledgement,
    Column,
    ConnectRequest,
    ConnectResponse,
    Gpu,
    Hello,
    Inventory,
    NodePlan,
    Policy,
    PoolMode,
    Reading,
    ResourceRequest,
    SampleBatch,
    SubmitWorkloadRequest,
    WorkloadSpec,
)
from eelgrid_protos.schema import fields_of
from eelgrid_protos.wire import agent_service_pb2, node_pb2, operator_service_pb2, policy_pb2

EXPORTED = [getattr(messages, name) for name in dir(messages)]
MESSAGES = [
    value
    for value in EXPORTED
    if is_dataclass(value) and isinstance(value, type) and value.__module__.startswith("eelgrid_protos")
]
ENUMS = [
    value
    for value in EXPORTED
    if isinstance(value, type) and issubclass(value, IntEnum) and value.__module__.startswith("eelgrid_protos.messages")
]
BATCH = SampleBatch(
    sequence=1,
    inventory_generation=1,
    time_ns=(10, 20),
    gpu_columns=(Column(reading=Reading.POWER_W, values=(1.0, 2.0, 3.0, 4.0)),),
)
SPEC = WorkloadSpec(name="train", request=ResourceRequest(cpu_milli=1000, gpu_count=1, gpu_milli=500))


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_fields_equal_the_wire(cls):
    """Ours and protobuf's message have the same fields, so none is lost silently."""
    descriptor = codec._wire_class(cls).DESCRIPTOR
    ours = {field.name for field in fields_of(cls) if field.shape.kind != "choice"}
    theirs = {field.name for field in descriptor.fields if field.containing_oneof is None or field.has_presence}
    in_oneofs = {field.name for oneof in descriptor.oneofs for field in oneof.fields if not oneof.name.startswith("_")}
    assert ours == theirs - in_oneofs
    choices = [field for field in fields_of(cls) if field.shape.kind == "choice"]
    assert bool(choices) == bool(in_oneofs)
    for field in choices:
        wire_types = {entry.message_type.name for entry in descriptor.oneofs_by_name[field.name].fields}
        assert {choice.__name__ for choice in field.shape.choices} == wire_types


@pytest.mark.parametrize("cls", ENUMS, ids=lambda cls: cls.__name__)
def test_enumerations_equal_the_wire(cls):
    enumerations = {}
    for descriptor in codec.file_descriptors():
        enumerations |= descriptor.enum_types_by_name
    wire = enumerations[cls.__name__]
    prefix = "".join("_" + c if c.isupper() and i else c for i, c in enumerate(cls.__name__)).upper() + "_"
    assert {member.name: int(member) for member in cls} == {
        value.name.removeprefix(prefix): value.number for value in wire.values
    }


def test_every_wire_message_is_ours():
    ours = {cls.__name__ for cls in MESSAGES}
    wire = {name for descriptor in codec.file_descriptors() for name in descriptor.message_types_by_name}
    assert wire == ours


def test_unknown_fields_are_passed_over():
    newer = codec.encode_message(SubmitWorkloadRequest(spec=SPEC)) + b"\xa2\x06\x03abc"
    assert codec.decode_message(SubmitWorkloadRequest, newer).spec == SPEC


def test_an_unknown_variant_is_none():
    assert codec.decode_message(ConnectRequest, b"\xa2\x06\x00").message is None
    assert codec.decode_message(ConnectResponse, b"").message is None


def test_an_unknown_reading_is_unspecified_and_may_repeat():
    wire = node_pb2.SampleBatch(sequence=1, inventory_generation=1, time_ns=[5])
    for reading in (900, 901):
        wire.gpu_columns.append(node_pb2.Column(reading=reading, values=[1.0]))
    batch = codec.decode_message(SampleBatch, wire.SerializeToString())
    assert [column.reading for column in batch.gpu_columns] == [Reading.UNSPECIFIED] * 2


def test_variants_survive():
    for message in (BATCH, Hello(incarnation=1, inventory=Inventory(node_name="n", cpu_milli=1, memory_bytes=1))):
        assert (
            codec.decode_message(ConnectRequest, codec.encode_message(ConnectRequest(message=message))).message
            == message
        )
    for message in (NodePlan(node_name="n", epoch=1, lease_s=10.0), Acknowledgement(sequence=4)):
        assert (
            codec.decode_message(ConnectResponse, codec.encode_message(ConnectResponse(message=message))).message
            == message
        )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (replace(BATCH, sequence=0), "sequence"),
        (replace(BATCH, time_ns=(20, 10)), "time_ns"),
        (replace(BATCH, gpu_columns=BATCH.gpu_columns * 2), "gpu_columns"),
        (replace(BATCH, time_ns=(10, 20, 30)), "gpu_columns"),
        (
            replace(BATCH, gpu_columns=(Column(reading=Reading.POWER_W, values=(float("nan"), 1.0)),)),
            "gpu_columns[0].values",
        ),
        (
            replace(BATCH, gpu_columns=(Column(reading=Reading.UNSPECIFIED, values=(float("nan"), 1.0)),)),
            "gpu_columns[0].values",
        ),
        (
            replace(BATCH, gpu_columns=(Column(reading=Reading.POWER_W, values=(-1.0, 1.0)),)),
            "gpu_columns[0].values",
        ),
        (
            replace(BATCH, gpu_columns=(Column(reading=Reading.POWER_W, values=(3e5, 1.0)),)),
            "gpu_columns[0].values",
        ),
        (
            replace(
                BATCH,
                gpu_columns=(
                    Column(
                        reading=Reading.POWER_W,
                        values=(1.0, 1.0),
                        absences=(Absence(reason=AbsenceReason.GPU_LOST, cells=(2,)),),
                    ),
                ),
            ),
            "gpu_columns[0].absences",
        ),
        (replace(SPEC, replicas=0), "replicas"),
        (replace(SPEC, name=""), "name"),
        (replace(SPEC, name="a b"), "name"),
        (replace(SPEC, name="n" * 300), "name"),
        (replace(SPEC, kind=messages.WorkloadKind.UNSPECIFIED), "kind"),
        (replace(SPEC, request=ResourceRequest(cpu_milli=-1)), "request.cpu_milli"),
        (replace(SPEC, request=ResourceRequest(cpu_milli=1.5)), "request.cpu_milli"),
        (replace(SPEC, request=ResourceRequest()), "request.cpu_milli"),
        (replace(SPEC, request=ResourceRequest(gpu_count=2, gpu_milli=500)), "request.gpu_milli"),
        (replace(SPEC, request=ResourceRequest(gpu_count=1)), "request.gpu_milli"),
        (replace(SPEC, request=ResourceRequest(cpu_milli=1, gpu_models=("T4",))), "request.gpu_models"),
        (replace(SPEC, user="a\nb"), "user"),
        (replace(SPEC, queue="a\x85b"), "queue"),
        (replace(SPEC, labels={"k": "v" * 300}), "labels[k]"),
        (NodePlan(node_name="n", epoch=1, lease_s=float("inf")), "lease_s"),
        (NodePlan(node_name="n", epoch=-1, lease_s=1.0), "epoch"),
        (Policy(pools=(PoolMode(pool="a", mode=messages.EnforcementMode.UNSPECIFIED),)), "pools[0].mode"),
        (Policy(send_interval_s=0.0), "send_interval_s"),
        (
            Inventory(
                node_name="n",
                cpu_milli=1,
                memory_bytes=1,
                gpus=(Gpu(uuid="GPU-1", index=0, product="x", model="x"),) * 2,
            ),
            "gpus",
        ),
    ],
)
def test_a_broken_rule_names_its_field_both_ways(message, field):
    with pytest.raises(InvalidMessage) as outgoing:
        codec.encode_message(message)
    assert field in [violation.field for violation in outgoing.value.violations]
    assert all(violation.problem and violation.remedy for violation in outgoing.value.violations)
    try:
        data = codec._to_wire(message).SerializeToString()
    except (TypeError, ValueError):
        return  # protobuf itself cannot say it
    with pytest.raises(InvalidMessage) as incoming:
        codec.decode_message(type(message), data)
    assert field in [violation.field for violation in incoming.value.violations]


def test_bytes_that_are_no_message():
    with pytest.raises(MalformedMessage):
        codec.decode_message(SampleBatch, b"\xff\xff\xff")


def test_a_missing_message_is_named():
    with pytest.raises(InvalidMessage) as caught:
        codec.decode_message(SubmitWorkloadRequest, b"")
    assert [violation.field for violation in caught.value.violations] == ["spec"]


def test_an_oversized_message_is_refused():
    with pytest.raises(MalformedMessage, match="at most"):
        codec.decode_message(SampleBatch, b"\x00" * (codec.MESSAGE_BYTES_MOST + 1))


def test_defaults_stand_in_for_what_the_wire_lacks():
    wire = agent_service_pb2.ConnectRequest()
    wire.hello.inventory.node_name = "n"
    message = codec.decode_message(ConnectRequest, wire.SerializeToString()).message
    assert isinstance(message, Hello)
    assert message.inventory.gpus == ()
    policy = operator_service_pb2.UpdatePolicyRequest()
    policy.policy.lease_s = policy.policy.send_interval_s = policy.policy.sample_interval_s = 10.0
    assert (
        codec.decode_message(messages.UpdatePolicyRequest, policy.SerializeToString()).policy.weights
        == Policy().weights
    )


def test_weights_of_an_older_client_weigh_locality_by_default_and_zero_is_zero():
    """A field that an older client does not send is the default, not 0, or its own balanced would be refused as custom."""
    older = policy_pb2.Policy(objective="balanced", lease_s=60.0, send_interval_s=5.0, sample_interval_s=1.0)
    older.weights.power, older.weights.fragmentation_w, older.weights.stranding_w = 1.0, 80.0, 200.0
    assert (
        codec.decode_message(Policy, older.SerializeToString()).weights.locality_w
        == messages.OBJECTIVES["balanced"].locality_w
    )
    off = replace(Policy(), weights=replace(messages.OBJECTIVES["balanced"], locality_w=0.0))
    assert codec.decode_message(Policy, codec.encode_message(off)) == off
