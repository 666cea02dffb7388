"""The survey: devices, how they are wired, and what is asked again."""

import time

from eelgrid_agent.devices.port import DriverUnavailable, GpuLostError, NotSupported
from eelgrid_agent.node.inventory import survey_devices
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_protos.messages import GpuLink


class Asked:
    """A device that counts how often its wiring was asked, and may fail at it."""

    def __init__(self, device, failure=None):
        self._device = device
        self._failure = failure
        self.times = 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def topology(self):
        self.times += 1
        if self._failure is not None:
            raise self._failure
        return self._device.topology()


def machine():
    gpus = tuple(GpuSpec(product=product) for product in ("h100-sxm5-80gb", "h100-sxm5-80gb", "t4"))
    spec = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=1, gpus=gpus)
    return SimulatedNode(spec, monotonic_ns=time.monotonic_ns, seed=1)


def test_every_pair_is_reported_by_index_with_its_links():
    links = {(link.one, link.other): link for link in survey_devices(machine()).links}
    assert set(links) == {(0, 1), (0, 2), (1, 2)}
    assert links[0, 1] == GpuLink(one=0, other=1, ancestor=10, nvlinks=18)
    assert links[0, 2].nvlinks == 0
    assert links[0, 2].ancestor > links[0, 1].ancestor


def test_wiring_is_asked_again_only_of_other_devices():
    device = Asked(machine())
    first = survey_devices(device)
    second = survey_devices(device, first)
    assert (second, device.times) == (first, 1)
    other = Asked(
        SimulatedNode(
            NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=1, gpus=(GpuSpec(product="t4"),)),
            monotonic_ns=time.monotonic_ns,
            seed=1,
        )
    )
    assert (survey_devices(other, first).links, other.times) == ((), 1)


def test_a_driver_that_does_not_tell_leaves_it_out_and_one_that_is_gone_is_a_problem():
    untold = survey_devices(Asked(machine(), NotSupported("no topology")))
    assert (len(untold.gpus), untold.links, untold.problem) == (3, (), "")
    silent = Asked(machine(), GpuLostError("one fell off the bus"))
    first = survey_devices(silent)
    assert (len(first.gpus), first.links, first.problem) == (3, (), "")
    assert (survey_devices(silent, first).links, silent.times) == ((), 2)
    gone = survey_devices(Asked(machine(), DriverUnavailable("unloaded")))
    assert (gone.gpus, gone.problem) == ((), "unloaded")
