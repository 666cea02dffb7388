"""A device under a fresh MIG executor, and the words that its tests share."""

from bench.naive_partitioner import State
from bench.node_crashes import Rig, spelled

from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import ApplyStatus, GpuLayout

PARTS = load_catalogue().geometries
A100, H100 = PARTS["a100-40gb"], PARTS["h100-80gb-sxm"]
G1, G2, G3, G4, G7 = 19, 14, 9, 5, 0
ONE, TWO, THREE, FOUR, SEVEN = (G1, 0, (0,)), (G2, 2, (1,)), (G3, 4, (2,)), (G4, 0, (3,)), (G7, 0, (4,))
OFF = GpuLayout(gpu_uuid="GPU-0")


def asked(rig, *instances):
    return spelled(rig.device.geometry, rig.device.uuid, State(True, frozenset(instances)))


def rig_with(*instances, geometry=H100, mig_enabled=True):
    """A device on which these were found, and adopted, by a fresh agent."""
    rig = Rig.of(geometry, mig_enabled=mig_enabled)
    for instance in instances:
        rig.device.stand(*instance)
    rig.executor.recover()
    return rig


def standing(rig):
    return {(part.profile_id, part.start, part.compute) for part in rig.layout().parts}


def kinds(rig):
    return [event.kind for event in rig.executor.drain_events()]


def refused(result, rule):
    return (result.status, result.rule) == (ApplyStatus.REFUSED, rule) and bool(result.detail)


def applied(result):
    return result.status is ApplyStatus.APPLIED
