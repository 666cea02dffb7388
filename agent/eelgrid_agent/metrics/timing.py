"""How long calls to the device library take, by call of the device port.

Owns the counting. Must not know what a call answers; time comes from the clock
it was given. A port in this process is timed by wrapping it, so that no adapter
counts by itself; a port in another process counts there. The thread that calls
counts and the thread of a scrape reads: a page may miss a call under way, and
nothing else.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from eelgrid_agent.device import Device, DeviceEvent, GpuLink, GpuProcess, InstanceReadings, RawReadings, Value
from eelgrid_agent.metrics.frame import Distribution
from eelgrid_agent.worker.latency import Latencies
from eelgrid_protos.messages import AccessLevel, Gpu, Reading

__all__ = ["TimedDevice", "distributions"]

_T = TypeVar("_T")


def distributions(times: Latencies) -> Mapping[str, Distribution]:
    """What was counted so far, by call."""
    return {
        call: Distribution(below=tuple(count for _, count in below), sum_s=sum_s) for call, _, sum_s, below in times
    }


class TimedDevice:
    """A device port that counts how long each of its calls takes, failed ones too."""

    def __init__(self, device: Device, times: Latencies, *, monotonic_ns: Callable[[], int]) -> None:
        self._device = device
        self._times = times
        self._monotonic_ns = monotonic_ns

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        begun_ns = self._monotonic_ns()
        try:
            return call()
        finally:
            self._times.add(name, (self._monotonic_ns() - begun_ns) / 1e9)

    def driver_version(self) -> str:
        """See Device."""
        return self._timed("driver_version", self._device.driver_version)

    def access(self) -> AccessLevel:
        """See Device."""
        return self._timed("access", self._device.access)

    def gpus(self) -> tuple[Gpu, ...]:
        """See Device."""
        return self._timed("gpus", self._device.gpus)

    def read(self, uuid: str) -> RawReadings:
        """See Device."""
        return self._timed("read", lambda: self._device.read(uuid))

    def read_slow(self, uuid: str) -> Mapping[Reading, Value]:
        """See Device."""
        return self._timed("read_slow", lambda: self._device.read_slow(uuid))

    def read_instances(self, uuid: str) -> tuple[InstanceReadings, ...]:
        """See Device."""
        return self._timed("read_instances", lambda: self._device.read_instances(uuid))

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """See Device."""
        return self._timed("processes", lambda: self._device.processes(uuid))

    def topology(self) -> tuple[GpuLink, ...]:
        """See Device."""
        return self._timed("topology", self._device.topology)

    def take_events(self) -> tuple[DeviceEvent, ...]:
        """See Device."""
        return self._timed("take_events", self._device.take_events)

    def close(self) -> None:
        """See Device."""
        self._device.close()
