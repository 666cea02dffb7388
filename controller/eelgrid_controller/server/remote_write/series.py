"""Series that are written to long-term storage: what batches, energy windows and metric pages become.

Owns the labels of targets, which ticks are written, and the counters of owners. Must not know how requests are encoded
beyond `wire`, or who receives them.

Theory. Names, labels and scales are those of the agents' and this controller's pages, so that a query, a rule and a
dashboard cannot tell who brought a series: `job` and `instance` say what they say of a scraped target. Times are those
at which agents read their devices. A receiver takes the samples of a series only in the order of their times, and
refuses a request for one that is not: so a reading of a node that is not newer than the last one written is left out,
and so is what lies further ahead than any clock should be, since nothing that comes later would be taken.

Agents' counters of owners are sums since the agent began, which the controller does not hear; it hears windows. So the
counters here begin at 0 with the first window of an owner, a millisecond after that window begins, and `increase` over
them is the energy of the windows that the ledger has. A controller that follows another begins again from 0, after the
last sample of the one before, which is a reset to every function of Prometheus and loses nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from eelgrid_controller.server.remote_write.wire import (
    TIME_MS_LEAST,
    TIME_MS_MOST,
    EncodedSamples,
    SampleLayout,
    Series,
    encode_labels,
    encode_samples,
)
from eelgrid_protos.agent_metrics import CATALOGUE, SHARE_LABELS, Metric, MetricScope, MetricSource
from eelgrid_protos.messages import (
    Column,
    EnergyOwner,
    EnergyWindow,
    Gpu,
    Inventory,
    OwnerKind,
    Reading,
    SampleBatch,
    WindowShare,
)
from eelgrid_protos.openmetrics import MetricFamily, MetricType

if TYPE_CHECKING:
    from prometheus_client.core import Metric as ClientFamily

# As docs/how-to/energy-ledger.md and the chart name what is scraped.
AGENT_JOB = "eelgrid-agent"
CONTROLLER_JOB = "eelgrid-controller"
# How far ahead of this controller's clock a node's may be: receivers take what is ten minutes ahead at most.
_AHEAD_MS_MOST = 60_000
# A tick that is early by so much is written: agents' ticks are not exact.
_EARLY = 0.05
# Owners whose counters are kept, and for how long after their last window.
OWNERS_MOST = 200_000
_OWNER_MS_MOST = 3600 * 1000
# Samples of one part: parts are what a request is made of, and what is refused by itself.
PART_SAMPLES_MOST = 2_000

# Of a node: what comes often, seldom, and with what is there for once.
_LAYOUTS_MOST = 8
_NONE: frozenset[int] = frozenset()
_OWNER_ENERGY = "eelgrid_workload_gpu_energy_joules_total"
_UNOWNED_ENERGY = "eelgrid_gpu_unattributed_energy_joules_total"
_UNOWNED_REASONS = {OwnerKind.UNALLOCATED: "unallocated", OwnerKind.UNATTRIBUTED: "unattributed"}


class _Shown(NamedTuple):
    """A column that is written, and the positions of devices without a value."""

    scope: MetricScope
    reading: Reading
    absent: frozenset[int]


def _is_of_gpu(metric: Metric) -> bool:
    """Whether the inventory alone says it."""
    paths = [path for _, path in metric.facts] or [str(source.of) for source in metric.sources]
    return metric.scope is MetricScope.GPU and bool(paths) and all(path.startswith("gpu.") for path in paths)


_OF_READING: Mapping[tuple[MetricScope, Reading], tuple[tuple[Metric, MetricSource], ...]] = {
    (metric.scope, reading): tuple(
        (one, source)
        for one in CATALOGUE
        if one.scope is metric.scope
        for source in one.sources
        if source.of is reading
    )
    for metric in CATALOGUE
    if metric.scope in (MetricScope.GPU, MetricScope.HOST)
    for reading in metric.readings
}
_OF_GPU = tuple(metric for metric in CATALOGUE if _is_of_gpu(metric))
_BY_NAME = {metric.name: metric for metric in CATALOGUE}
_NODE_INFO, _GPU_UP, _GPU_CORDONED = (
    _BY_NAME[name] for name in ("eelgrid_node_info", "eelgrid_gpu_up", "eelgrid_gpu_cordoned")
)


class NodeSeries:
    """Series of one node by its inventory, and when each reading was last written."""

    def __init__(self, inventory: Inventory, labels: Mapping[str, str], before: "NodeSeries | None" = None) -> None:
        """`labels` are those of every series of the cluster; `before` are the node's by its inventory until now."""
        self.inventory = inventory
        self._labels = {**labels, "job": AGENT_JOB, "instance": inventory.node_name}
        # None is what the inventory says by itself. Times go on with another inventory.
        self.written_ms: dict[Reading | None, int] = {} if before is None else before.written_ms
        self.heard_ms = 0
        self._devices: list[tuple[str, ...]] = [(gpu.uuid,) for gpu in inventory.gpus]
        self._layouts: dict[tuple[tuple[_Shown, ...], bool], SampleLayout] = {}
        self._facts = list(self._describe())

    def _make(self, metric: Metric, subject: tuple[str, ...], more: Iterable[str]) -> Series:
        values = dict(zip(metric.all_labels, (*subject, *more), strict=True))
        return encode_labels({**self._labels, **values, "__name__": metric.name})

    def _describe(self) -> Iterator[tuple[Series, float]]:
        """What the inventory says by itself."""
        node = self.inventory
        facts = (node.node_name, node.pool, node.driver_version, node.boot_id, node.access.name.lower())
        yield self._make(_NODE_INFO, (), (*facts, str(node.simulated).lower())), 1.0
        for gpu in node.gpus:
            yield self._make(_GPU_UP, (gpu.uuid,), ()), float(not gpu.lost)
            yield self._make(_GPU_CORDONED, (gpu.uuid,), ()), float(bool(gpu.cordon))
            for metric in _OF_GPU:
                yield from self._describe_gpu(metric, gpu)

    def _describe_gpu(self, metric: Metric, gpu: Gpu) -> Iterator[tuple[Series, float]]:
        if metric.kind is MetricType.INFO:
            values = [str(attrgetter(path.removeprefix("gpu."))(gpu)) for _, path in metric.facts]
            yield self._make(metric, (gpu.uuid,), values), 1.0
            return
        for source in metric.sources:
            value = attrgetter(str(source.of).removeprefix("gpu."))(gpu)
            if value is not None:
                yield self._make(metric, (gpu.uuid,), source.labels), float(value) * source.scale

    def _list_series(self, shown: "_Shown") -> Iterator[Series]:
        """The series of a column, of those devices that have a value, in the order of `_list_values`."""
        subjects = self._devices if shown.scope is MetricScope.GPU else [()]
        for metric, source in _OF_READING[shown.scope, shown.reading]:
            for at, subject in enumerate(subjects):
                if at not in shown.absent:
                    for more in [(name,) for name in metric.code_names] or (source.labels,):
                        yield self._make(metric, subject, more)

    def encode_batch(self, batch: SampleBatch, *, interval_ms: int, now_ms: int) -> "EncodedBatch":
        """What is due of a batch: of each reading the ticks that are an interval after the last one written."""
        parts, skipped = [], 0
        for tick, time_ns in enumerate(batch.time_ns):
            time_ms = time_ns // 1_000_000
            shown: list[_Shown] = []
            values: list[float] = []
            for scope, columns in ((MetricScope.GPU, batch.gpu_columns), (MetricScope.HOST, batch.host_columns)):
                for column in columns:
                    width = len(column.values) // len(batch.time_ns)
                    written_ms = self.written_ms.get(column.reading)
                    if (scope, column.reading) not in _OF_READING or _is_early(time_ms, written_ms, interval_ms):
                        continue
                    if not _is_timely(time_ms, written_ms, now_ms):
                        skipped += width
                        continue
                    self.written_ms[column.reading] = time_ms
                    one = _Shown(scope, column.reading, _absent_positions(column, tick * width, width))
                    shown.append(one)
                    values += _list_values(one, column.values[tick * width : (tick + 1) * width])
            if values:
                facts = self._facts if self._are_facts_due(time_ms, interval_ms) else []
                layout = self._layout(tuple(shown), facts)
                parts.append(layout.fill([*(value for _, value in facts), *values], time_ms))
        return EncodedBatch(parts, skipped)

    def _layout(self, shown: "tuple[_Shown, ...]", facts: list[tuple[Series, float]]) -> SampleLayout:
        """Where all of it stands in a part, which is the same as long as the same readings are there."""
        key = shown, bool(facts)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_MOST:
                self._layouts.clear()
            found = [series for series, _ in facts] + [series for one in shown for series in self._list_series(one)]
            layout = self._layouts[key] = SampleLayout(found)
        return layout

    def _are_facts_due(self, time_ms: int, interval_ms: int) -> bool:
        written_ms = self.written_ms.get(None)
        if written_ms is not None and time_ms - written_ms < interval_ms * (1.0 - _EARLY):
            return False
        self.written_ms[None] = time_ms
        return True


class EncodedBatch(NamedTuple):
    """Parts of requests, and samples that were left out because of their times."""

    parts: list[EncodedSamples]
    skipped: int


def _is_early(time_ms: int, written_ms: int | None, interval_ms: int) -> bool:
    return written_ms is not None and 0 <= time_ms - written_ms < interval_ms * (1.0 - _EARLY)


def _is_timely(time_ms: int, written_ms: int | None, now_ms: int) -> bool:
    """Whether a receiver takes a time after the last one, and will take those that come."""
    is_later = written_ms is None or time_ms > written_ms
    return is_later and TIME_MS_LEAST <= time_ms <= min(TIME_MS_MOST, now_ms + _AHEAD_MS_MOST)


def _absent_positions(column: Column, start: int, width: int) -> frozenset[int]:
    cells = (cell - start for absence in column.absences for cell in absence.cells)
    return frozenset(cell for cell in cells if 0 <= cell < width) if column.absences else _NONE


def _list_values(shown: _Shown, values: Sequence[float]) -> Iterator[float]:
    """The numbers of a column's series."""
    present = [value for at, value in enumerate(values) if at not in shown.absent] if shown.absent else values
    for metric, source in _OF_READING[shown.scope, shown.reading]:
        if metric.code_names:
            for value in present:
                yield from (float(bool(one)) for one in metric.split_code(int(value)))
        elif source.scale == 1.0:
            yield from present
        else:
            yield from (value * source.scale for value in present)


def list_owner_labels(owner: EnergyOwner, gpu_uuid: str, share: WindowShare) -> tuple[str, ...]:
    """The values of SHARE_LABELS, as the agent's page has them."""
    return (
        gpu_uuid,
        owner.kind.name.lower(),
        "" if share.gpu_instance_id is None else str(share.gpu_instance_id),
        owner.namespace,
        owner.pod or owner.pod_uid,
        owner.container or owner.container_id[:12],
        owner.job,
        owner.step,
        owner.workload,
        owner.unit,
        owner.ray_job,
        share.part.name.lower(),
        share.method.name.lower(),
        share.confidence.name.lower(),
    )


class _Counter(NamedTuple):
    """Energy of one owner at one device, and the time of its last sample."""

    series: Series
    energy_mj: int
    time_ms: int


class OwnerCounters:
    """Counters of energy by owner, added up from windows that are in the ledger."""

    def __init__(self, labels: Mapping[str, str], *, owners_most: int = OWNERS_MOST) -> None:
        self._labels = labels
        self._most = owners_most
        # The one whose last window is longest ago is first.
        self._counters: OrderedDict[tuple[str, ...], _Counter] = OrderedDict()

    def encode_window(self, node_name: str, window: EnergyWindow) -> EncodedBatch:
        """What a window adds, at its end; counters that begin with it are 0 at its begin."""
        end_ms, begin_ms = window.end_ns // 1_000_000, window.begin_ns // 1_000_000 + 1
        if not TIME_MS_LEAST <= begin_ms < end_ms <= TIME_MS_MOST:
            return EncodedBatch([], len(window.shares))
        added: dict[tuple[str, ...], int] = {}
        for share in window.shares:
            owner, gpu = window.owners[share.owner], window.devices[share.device].gpu_uuid
            reason = _UNOWNED_REASONS.get(owner.kind)
            key = (node_name, gpu, reason) if reason else (node_name, *list_owner_labels(owner, gpu, share))
            added[key] = added.get(key, 0) + share.energy_mj
        begun, ended, skipped = [], [], 0
        for key, energy_mj in added.items():
            known = self._counters.pop(key, None)
            if known is None:
                known = _Counter(self._make(key), 0, begin_ms)
                begun.append((known.series, 0.0))
            if known.time_ms >= end_ms:
                skipped += 1
                end = known._replace(energy_mj=known.energy_mj + energy_mj)
            else:
                end = _Counter(known.series, known.energy_mj + energy_mj, end_ms)
                ended.append((end.series, end.energy_mj / 1000.0))
            self._counters[key] = end
        self._forget(end_ms)
        parts = [encode_samples(found, at_ms) for found, at_ms in ((begun, begin_ms), (ended, end_ms)) if found]
        return EncodedBatch(parts, skipped)

    def _make(self, key: tuple[str, ...]) -> Series:
        node_name, *values = key
        is_owned = len(values) == len(SHARE_LABELS)
        name, names = (_OWNER_ENERGY, SHARE_LABELS) if is_owned else (_UNOWNED_ENERGY, ("gpu", "reason"))
        target = {**self._labels, "job": AGENT_JOB, "instance": node_name, "__name__": name}
        return encode_labels({**target, **dict(zip(names, values, strict=True))})

    def _forget(self, now_ms: int) -> None:
        counters = self._counters
        while counters:
            oldest = next(iter(counters.values()))
            if len(counters) <= self._most and oldest.time_ms > now_ms - _OWNER_MS_MOST:
                return
            counters.popitem(last=False)


class PageSeries:
    """The series of this controller's own page, whose labels are encoded once."""

    def __init__(self, labels: Mapping[str, str], instance: str) -> None:
        self._labels = {**labels, "job": CONTROLLER_JOB, "instance": instance}
        self._known: dict[tuple[str, tuple[tuple[str, str], ...]], Series] = {}

    def encode_page(self, families: "Iterable[MetricFamily | ClientFamily]", time_ms: int) -> list[EncodedSamples]:
        """All of it at one time."""
        known, self._known = self._known, {}
        samples = []
        for family in families:
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                series = known.get(key) or encode_labels({**self._labels, **sample.labels, "__name__": sample.name})
                self._known[key] = series
                samples.append((series, float(sample.value)))
        return [
            encode_samples(samples[begin : begin + PART_SAMPLES_MOST], time_ms)
            for begin in range(0, len(samples), PART_SAMPLES_MOST)
        ]
