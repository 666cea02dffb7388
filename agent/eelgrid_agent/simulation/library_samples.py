"""The hardware counters (GPM) of the simulated library: samples that a caller holds, and what lies between two.

A sample is memory of the library: it is given out, filled, and given back. The
two of a request must be of one device, or one instance of it, in one life.
"""

from dataclasses import dataclass
from itertools import count
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, address_of, behind, point
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.sensors import Activity, activity_between
from eelgrid_agent.simulation.work import WorkDone

__all__ = ["sample_symbols"]

_INVALID = int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
_NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
_MISMATCH = int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
# A caller that gives nothing back runs out of memory.
_SAMPLES_MOST = 4096
_FIRST, _STEP = 0x7E00_0000_0000_0000, 0x100


@dataclass(frozen=True, slots=True)
class _Sample:
    gpu: SimGpu
    # The life that the counters are of: the device's, or that of an instance, which is another one each time.
    life: object
    now_ns: int
    done: WorkDone

    def fits(self, other: "_Sample") -> bool:
        """Whether the other is a later one of the same."""
        return (self.gpu.uuid, self.life) == (other.gpu.uuid, other.life) and self.now_ns < other.now_ns


def sample_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    samples: dict[int, _Sample | None] = {}
    addresses = count(_FIRST, _STEP)

    def supports(gpu: SimGpu, ref: Any) -> int:
        info = behind(ref)
        if info.version != pynvml.NVML_GPM_SUPPORT_VERSION:
            return _MISMATCH
        info.isSupportedDevice = int(node.sensors(gpu).has_activity)
        return 0

    def allocate(ref: Any) -> int:
        if code := handles.session():
            return code
        if len(samples) >= _SAMPLES_MOST:
            return int(pynvml.NVML_ERROR_MEMORY)
        address = next(addresses)
        samples[address] = None
        point(behind(ref), address)
        return 0

    def free(sample: Any) -> int:
        if address_of(sample) not in samples:
            return _INVALID
        del samples[address_of(sample)]
        return 0

    def take(gpu: SimGpu, sample: Any) -> int:
        return fill(gpu, None, sample)

    def take_of_instance(gpu: SimGpu, instance_id: int, sample: Any) -> int:
        return fill(gpu, instance_id, sample) if instance_id in gpu.mig.instances else _INVALID

    def fill(gpu: SimGpu, instance_id: int | None, sample: Any) -> int:
        if not node.sensors(gpu).has_activity:
            return _NOT_SUPPORTED
        address, now_ns = address_of(sample), node.monotonic_ns()
        if address not in samples:
            return _INVALID
        done = gpu.work(now_ns) if instance_id is None else gpu.loads.done_on(instance_id, now_ns)
        life = gpu.generation if instance_id is None else gpu.mig.instances[instance_id]
        samples[address] = _Sample(gpu, life, now_ns, done)
        return 0

    def metrics(ref: Any) -> int:
        request = behind(ref)
        if request.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            return _MISMATCH
        first, second = samples.get(address_of(request.sample1)), samples.get(address_of(request.sample2))
        if first is None or second is None or not first.fits(second):
            return _INVALID
        told = _metrics(activity_between((first.now_ns, first.done), (second.now_ns, second.done)))
        for metric in request.metrics[: request.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in told else _NOT_SUPPORTED
            metric.value = told.get(metric.metricId, 0.0)
        return 0

    return {
        "nvmlGpmQueryDeviceSupport": handles.on_device(supports),
        "nvmlGpmSampleAlloc": allocate,
        "nvmlGpmSampleFree": free,
        "nvmlGpmSampleGet": handles.on_device(take),
        "nvmlGpmMigSampleGet": handles.on_device(take_of_instance),
        "nvmlGpmMetricsGet": metrics,
    }


def _metrics(activity: Activity) -> dict[int, float]:
    """By NVML's numbers, in per cent and MiB a second."""
    return {
        1: activity.graphics, 2: activity.sm, 3: activity.occupancy, 5: activity.tensor, 10: activity.memory,
        11: activity.fp64, 12: activity.fp32, 13: activity.fp16, 20: activity.pcie_sent, 21: activity.pcie_received,
    }  # fmt: skip
