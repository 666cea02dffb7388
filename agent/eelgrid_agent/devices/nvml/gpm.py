"""GPU performance monitoring (GPM): activity ratios from hardware counters of Hopper and newer.

A reading covers the time between two samples; two samples less than 100 ms apart yield nothing. A GPU instance is
sampled through its parent. Samples are driver memory and are freed before the session ends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from eelgrid_agent.devices.nvml.readings import filter_implausible
from eelgrid_agent.devices.nvml.session import MISSING_BY_REASON, SILENT_REASONS, get_absence_reason
from eelgrid_agent.devices.port import ReadingValue
from eelgrid_protos.messages import AbsenceReason, Reading

_APART_LEAST_NS = 100_000_000
_PERCENT, _MIB = 1.0 / 100.0, float(2**20)
# Counters and clock are read one after the other: a full share may come out a little over.
_OVER_MOST = 1.05
GPM_METRICS: Mapping[Reading, tuple[int, float]] = {
    Reading.GRAPHICS_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, _PERCENT),
    Reading.SM_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_SM_UTIL, _PERCENT),
    Reading.SM_OCCUPANCY_RATIO: (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, _PERCENT),
    Reading.TENSOR_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, _PERCENT),
    Reading.MEMORY_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, _PERCENT),
    Reading.FP16_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP16_UTIL, _PERCENT),
    Reading.FP32_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP32_UTIL, _PERCENT),
    Reading.FP64_ACTIVITY_RATIO: (pynvml.NVML_GPM_METRIC_FP64_UTIL, _PERCENT),
    Reading.PCIE_SENT_BYTES_PER_S: (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
    Reading.PCIE_RECEIVED_BYTES_PER_S: (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
}


@dataclass(frozen=True, slots=True)
class _Sample:
    taken_ns: int
    sample: Any


class GpmSampler:
    """The samples of one session; the second key is the GPU instance, or None for the device."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._supported: dict[str, bool] = {}
        self._samples: dict[tuple[str, int | None], _Sample] = {}
        self._request = pynvml.c_nvmlGpmMetricsGet_t()

    def read(self, handle: Any, uuid: str, instance_id: int | None) -> dict[Reading, ReadingValue]:
        """Activity since the call before; raises NVMLError when the device is silent."""
        try:
            if not self._is_supported(handle, uuid):
                return _nothing(AbsenceReason.NOT_SUPPORTED)
            key, now_ns = (uuid, instance_id), self._monotonic_ns()
            before = self._samples.get(key)
            if before is not None and now_ns - before.taken_ns < _APART_LEAST_NS:
                return _nothing(AbsenceReason.NOT_SAMPLED)
            self._samples[key] = _Sample(now_ns, _take_sample(handle, instance_id))
        except pynvml.NVMLError as error:
            reason = get_absence_reason(error)
            if reason in SILENT_REASONS:
                raise
            return _nothing(reason)
        if before is None:
            return _nothing(AbsenceReason.NOT_SAMPLED)
        try:
            return self._between(before.sample, self._samples[key].sample)
        finally:
            _give_back(before.sample)

    def retain_instances(self, uuid: str, instance_ids: frozenset[int]) -> None:
        """Gives back the samples of a device's instances other than these."""
        gone = [key for key in self._samples if key[0] == uuid and key[1] is not None and key[1] not in instance_ids]
        for key in gone:
            _give_back(self._samples.pop(key).sample)

    def release_samples(self) -> None:
        """Gives everything back; the next samples are the first ones."""
        for kept in self._samples.values():
            _give_back(kept.sample)
        self._samples.clear()
        self._supported.clear()

    def _is_supported(self, handle: Any, uuid: str) -> bool:
        if uuid not in self._supported:
            self._supported[uuid] = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        return self._supported[uuid]

    def _between(self, first: Any, second: Any) -> dict[Reading, ReadingValue]:
        request = self._request
        request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
        request.sample1, request.sample2 = first, second
        for place, (metric, _) in enumerate(GPM_METRICS.values()):
            request.metrics[place].metricId = metric
        try:
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            # The device was reset between the two samples.
            return _nothing(AbsenceReason.NOT_SAMPLED)
        values: dict[Reading, ReadingValue] = {}
        for place, (reading, (_, unit)) in enumerate(GPM_METRICS.items()):
            metric = request.metrics[place]
            number = float(metric.value) * unit
            if metric.nvmlReturn or not math.isfinite(number):
                values[reading] = MISSING_BY_REASON[AbsenceReason.NOT_SUPPORTED]
            elif unit == _PERCENT and 1.0 < number <= _OVER_MOST:
                values[reading] = 1.0
            else:
                values[reading] = filter_implausible(reading, number)
        return values


def _take_sample(handle: Any, instance_id: int | None) -> Any:
    sample = pynvml.nvmlGpmSampleAlloc()
    try:
        if instance_id is None:
            pynvml.nvmlGpmSampleGet(handle, sample)
        else:
            pynvml.nvmlGpmMigSampleGet(handle, instance_id, sample)
    except pynvml.NVMLError:
        _give_back(sample)
        raise
    return sample


def _give_back(sample: Any) -> None:
    try:
        pynvml.nvmlGpmSampleFree(sample)
    except pynvml.NVMLError:
        # The driver went, and its memory with it.
        return


def _nothing(reason: AbsenceReason) -> dict[Reading, ReadingValue]:
    return dict.fromkeys(GPM_METRICS, MISSING_BY_REASON[reason])
