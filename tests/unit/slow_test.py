"""A slow look as columns: order of the inventory, reasons kept, what nobody offers left out, and a batch of its own."""

import pytest

from eelgrid_agent.devices.port import InstanceReadings, Missing, RawReadings
from eelgrid_agent.devices.sampler import ExtendedReadings, NodeSample, Sampler, build_extended_columns
from eelgrid_agent.node.spool import Spool
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import Absence, AbsenceReason, Gpu, GpuInstance, Inventory, Reading, SampleBatch

UNSUPPORTED = Missing(AbsenceReason.NOT_SUPPORTED)
PARTS = tuple(
    GpuInstance(id=number, profile_id=9, profile="3g.20gb", start=start, size=4) for number, start in ((1, 0), (2, 4))
)
INVENTORY = Inventory(
    node_name="n",
    cpu_milli=1,
    memory_bytes=1,
    gpus=(
        Gpu(uuid="GPU-a", index=0, product="p", model="m"),
        Gpu(uuid="GPU-b", index=1, product="p", model="m", mig_capable=True, mig_enabled=True, gpu_instances=PARTS),
    ),
)


def slow_look() -> ExtendedReadings:
    memory = {Reading.MEMORY_USED_BYTES: 5.0, Reading.SM_ACTIVITY_RATIO: UNSUPPORTED}
    return ExtendedReadings(
        monotonic_ns=1,
        wall_ns=1,
        gpus={
            "GPU-a": {Reading.ECC_CORRECTED_VOLATILE: 3.0, Reading.FABRIC_STATE: UNSUPPORTED},
            "GPU-b": {
                Reading.ECC_CORRECTED_VOLATILE: UNSUPPORTED,
                Reading.FABRIC_STATE: UNSUPPORTED,
                Reading.MEMORY_TEMPERATURE_C: 9000.0,
            },
        },
        instances={"GPU-b": (InstanceReadings(gpu_instance_id=2, values=memory),)},
        host={Reading.HOST_CPU_ENERGY_J: 7.0},
    )


def quick(power_w: float = 100.0) -> RawReadings:
    return RawReadings(
        energy_counter_j=UNSUPPORTED, values={Reading.POWER_W: power_w, Reading.POWER_AVERAGE_W: power_w - 1.0}
    )


def test_columns_follow_the_inventory_and_what_nobody_offers_has_none() -> None:
    riding = build_extended_columns(slow_look(), {"GPU-a": quick()}, INVENTORY)
    columns = {column.reading: column for column in riding.gpus}
    assert set(columns) == {Reading.POWER_AVERAGE_W, Reading.ECC_CORRECTED_VOLATILE, Reading.MEMORY_TEMPERATURE_C}
    ecc = columns[Reading.ECC_CORRECTED_VOLATILE]
    assert ecc.values == (3.0, 0.0)
    assert ecc.absences == (Absence(reason=AbsenceReason.NOT_SUPPORTED, cells=(1,)),)
    # A temperature that no sensor can mean is an absence, and so is one that nobody asked for.
    assert {absence.reason: absence.cells for absence in columns[Reading.MEMORY_TEMPERATURE_C].absences} == {
        AbsenceReason.NOT_SAMPLED: (0,),
        AbsenceReason.IMPLAUSIBLE: (1,),
    }
    assert columns[Reading.POWER_AVERAGE_W].cell(0) == 99.0
    (memory,) = riding.instances
    assert (memory.reading, memory.values) == (Reading.MEMORY_USED_BYTES, (0.0, 5.0))
    assert [column.reading for column in riding.host] == [Reading.HOST_CPU_ENERGY_J]


@pytest.mark.parametrize("ticks", [1, 5])
def test_a_tick_with_a_slow_look_is_a_batch_of_its_own_that_the_contract_takes(ticks: int) -> None:
    sampler, spool = Sampler(sample_interval_s=1.0), Spool(window=64, ticks_most=100)
    for second in range(ticks):
        look = NodeSample(
            wall_ns=second * 10**9,
            monotonic_ns=second * 10**9,
            generation=1,
            gpus=(("GPU-a", quick()), ("GPU-b", quick())),
            host={},
        )
        riding = build_extended_columns(slow_look(), dict(look.gpus), INVENTORY) if second == ticks // 2 else None
        spool.add(sampler.observe(look, riding=riding).tick)
    batches = []
    while batch := spool.next_batch():
        batches.append(batch)
    assert [len(batch.time_ns) for batch in batches] == ([1] if ticks == 1 else [2, 1, 2])
    assert sum(bool(batch.instance_columns) for batch in batches) == 1
    for batch in batches:
        assert decode_message(SampleBatch, encode_message(batch)) == batch
