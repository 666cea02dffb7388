"""Codec properties: whatever obeys the rules survives bytes and JSON, and garbage only ever raises typed errors."""

import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import strategies

from eelgrid_protos import codec, messages, plain_messages, rpc
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    ConnectResponse,
    Explanation,
    GetNodeEnergyResponse,
    Inventory,
    NodePlan,
    PlanApplied,
    Policy,
    SampleBatch,
    Summary,
    Workload,
)
from eelgrid_protos.schema import list_violations

ROUND_TRIPS = [
    Inventory,
    NodePlan,
    PlanApplied,
    Policy,
    Workload,
    Explanation,
    Summary,
    ConnectResponse,
    GetNodeEnergyResponse,
]
# `make fuzz` sets this to a million; the tests keep a bounded run.
FUZZ_MESSAGES = int(os.environ.get("EELGRID_FUZZ_MESSAGES", "20000"))
# Large messages are slow to draw; a few dozen of each say as much as a hundred.
RELAXED = settings(
    max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None
)


@pytest.mark.parametrize("cls", ROUND_TRIPS, ids=lambda cls: cls.__name__)
@RELAXED
@given(data=st.data())
def test_bytes_and_json_keep_every_message(cls, data):
    message = data.draw(strategies.message(cls))
    assert codec.decode_message(cls, codec.encode_message(message)) == message
    assert plain_messages.from_plain(cls, json.loads(json.dumps(plain_messages.to_plain(message)))) == message
    assert plain_messages.from_plain(cls, plain_messages.to_plain(message, brief=True)) == message


@RELAXED
@given(ticks=st.integers(1, 4), gpus=st.integers(0, 8), data=st.data())
def test_batches_survive(ticks, gpus, data):
    readings = data.draw(st.lists(st.sampled_from(list(messages.READING_RANGES)), unique=True, max_size=4))
    columns = []
    for reading in readings:
        bounds = messages.READING_RANGES[reading]
        cells = st.lists(st.floats(bounds.low, bounds.high), min_size=ticks * gpus, max_size=ticks * gpus)
        columns.append(messages.Column(reading=reading, values=tuple(data.draw(cells))))
    batch = SampleBatch(
        sequence=data.draw(st.integers(1, 2**63)),
        inventory_generation=1,
        time_ns=tuple(range(ticks)),
        gpu_columns=tuple(columns),
    )
    assert codec.decode_message(SampleBatch, codec.encode_message(batch)) == batch


def _seeds() -> list[tuple[type, bytes]]:
    """One well-formed message of every request, as bytes to be damaged."""
    request = messages.ResourceRequest(cpu_milli=1000, memory_bytes=1 << 30, gpu_count=1, gpu_milli=500)
    spec = messages.WorkloadSpec(name="a", request=request, labels={"team": "x"})
    column = messages.Column(reading=messages.Reading.POWER_W, values=(1.0, 2.0))
    batch = SampleBatch(sequence=3, inventory_generation=1, time_ns=(1, 2), gpu_columns=(column,))
    gpu = messages.Gpu(uuid="GPU-1", index=0, product="NVIDIA A100", model="A100")
    inventory = Inventory(node_name="n-1", cpu_milli=96_000, memory_bytes=1 << 39, gpus=(gpu,))
    examples: list[object] = [
        messages.SubmitWorkloadRequest(spec=spec, workload_id="w-1"),
        messages.ConnectRequest(message=batch),
        messages.ConnectRequest(message=messages.Hello(incarnation=7, inventory=inventory)),
        messages.UpdatePolicyRequest(policy=Policy()),
        messages.ListWorkloadsRequest(page_size=10, phases=(messages.WorkloadPhase.PENDING,)),
        messages.ConnectResponse(message=NodePlan(node_name="n-1", epoch=3, lease_s=30.0)),
    ]
    return [(type(example), codec.encode_message(example)) for example in examples]


def test_damaged_and_random_bytes_raise_only_contract_errors():
    """Random bytes, flipped bits, cut and spliced messages: a message that obeys the rules, or a typed error."""
    rng = random.Random(20_261_121)
    seeds = _seeds()
    classes = [
        m.request
        for s in (rpc.OPERATOR_SERVICE, rpc.NODE_SERVICE, rpc.AGENT_SERVICE, rpc.FLUX_SERVICE)
        for m in s.methods
    ]
    refused = unexplained = 0
    for _ in range(FUZZ_MESSAGES):
        cls, data = rng.choice(seeds)
        damaged = bytearray(data)
        match rng.randrange(4):
            case 0:
                cls, damaged = rng.choice(classes), bytearray(rng.randbytes(rng.randrange(64)))
            case 1:
                for _ in range(rng.randrange(1, 5)):
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            case 2:
                damaged = damaged[: rng.randrange(len(damaged))]
            case _:
                other = rng.choice(seeds)[1]
                damaged = damaged[: rng.randrange(len(damaged))] + other[rng.randrange(len(other)) :]
        try:
            message = codec.decode_message(cls, bytes(damaged))
        except ContractError as error:
            unexplained += not error.violations
            refused += 1
        else:
            assert codec.decode_message(cls, codec.encode_message(message)) == message
    assert not unexplained
    assert FUZZ_MESSAGES * 0.1 < refused < FUZZ_MESSAGES


_EDGES = (-1, 0, 1, 2**32, 2**63, 2**64, 1.5, float("nan"), float("inf"), -1e9, 1e301)
_OTHERS = {"reading": tuple(messages.Reading), "reason": tuple(messages.AbsenceReason)}


@st.composite
def _batches(draw):
    """Sound batches of one or two columns, each with up to two parts put wrong."""
    ticks, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cells = ticks * gpus
    parts = {
        "sequence": 1,
        "inventory_generation": 1,
        "dropped_ticks": 0,
        "time": [5] * ticks,
        "power": [1.0] * cells,
        "energy": [2.0] * cells,
        "host": [0.5] * ticks,
        "cells": [0],
        "reading": messages.Reading.ENERGY_J,
        "reason": messages.AbsenceReason.TIMED_OUT,
    }
    for name in draw(st.lists(st.sampled_from(sorted(parts)), max_size=2)):
        if not isinstance(parts[name], list):
            parts[name] = draw(st.sampled_from(_OTHERS.get(name, _EDGES)))
        elif draw(st.booleans()):
            parts[name] = parts[name][1:]
        elif parts[name]:
            parts[name][draw(st.integers(0, len(parts[name]) - 1))] = draw(st.sampled_from(_EDGES))
    absence = messages.Absence(reason=parts["reason"], cells=tuple(parts["cells"]))
    column, reading = messages.Column, messages.Reading
    return SampleBatch(
        sequence=parts["sequence"],
        inventory_generation=parts["inventory_generation"],
        dropped_ticks=parts["dropped_ticks"],
        time_ns=tuple(parts["time"]),
        gpu_columns=(
            column(reading=reading.POWER_W, values=tuple(parts["power"])),
            column(reading=parts["reading"], values=tuple(parts["energy"]), absences=(absence,)),
        ),
        host_columns=(column(reading=reading.HOST_CPU_UTILIZATION_RATIO, values=tuple(parts["host"])),),
    )


@settings(max_examples=1000, deadline=None)
@given(batch=_batches())
def test_the_quick_test_of_a_batch_says_yes_only_where_the_thorough_one_does(batch):
    violations = list(list_violations(batch))
    sound = all(type(number) is int for number in (batch.sequence, batch.inventory_generation, batch.dropped_ticks))
    assert not (batch.obeys() and violations)
    assert batch.obeys() or violations or not sound or not batch.time_ns or not batch.gpu_columns[0].values
