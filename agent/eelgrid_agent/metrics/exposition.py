"""Renders a snapshot of the agent as the bytes of a scrape, in Prometheus' text format and OpenMetrics.

Owns the lines that are kept between pages and the order of families; heads,
escapes and numbers are those of `eelgrid_protos.openmetrics`. Must not know
names or units (the catalogue's) nor who asks for a page.

Theory. What a series is called changes only when a device or an instance
appears, so everything before the number is made once for each subject and
kept; a page is then a number behind each prefix. Both formats write samples
alike and differ in the heads of families and in the last line, so samples are
written once. A reading out of its range is a sentinel or a fault of the
driver's: it is absent, as a missing one is, and the page says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from eelgrid_agent.devices.port import FAST_READINGS, LATENCY_BUCKETS_S, InstanceReadings, Missing, ReadingValue
from eelgrid_agent.metrics.snapshot import AgentSnapshot, GpuView, LatencyDistribution, NodeMetricsView
from eelgrid_protos.agent_metrics import (
    CATALOGUE,
    GPU_ABSENT,
    HOST_ABSENT,
    INSTANCE_ABSENT,
    Metric,
    MetricScope,
    MetricSource,
)
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Reading
from eelgrid_protos.openmetrics import MetricType, format_labels, format_number, openmetrics_head, prometheus_head
from eelgrid_protos.values import dataclass

_NOTHING: Mapping[Reading, ReadingValue] = {}
_BUCKETS = (*(repr(bound) for bound in LATENCY_BUCKETS_S), "+Inf")
# Names of series that are no readings, kept between pages: twice what the busiest node shows.
_NAMES_MOST = 20_000
# The same of states and masks: a dozen values of each, of every device.
_CODES_MOST = 5_000


@dataclass(frozen=True, slots=True)
class RenderedMetrics:
    """One page: samples by family, and both heads of each."""

    _parts: tuple[tuple[str, str, str], ...]

    def prometheus(self) -> bytes:
        """The text format, version 0.0.4."""
        return "".join([head + samples for head, _, samples in self._parts]).encode("utf-8", "replace")

    def openmetrics(self) -> bytes:
        """OpenMetrics 1.0.0."""
        return ("".join([head + samples for _, head, samples in self._parts]) + "# EOF\n").encode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One source of a metric that is a reading, with what it takes to judge and to scale it."""

    metric: int
    reading: Reading
    label: str
    low: float
    high: float
    scale: float
    values: tuple[str, ...]


# A prefix for each cell: one series, or one for each code and one for the rest.
_Prefix = str | tuple[str, ...]
# What the loop over readings takes of a cell of one subject: to look a field up there would be half of its time.
_Row = tuple[Reading, float, float, float, int, _Prefix, _Cell]


class MetricsRenderer:
    """Renders one frame after another; keeps what stays the same between them."""

    def __init__(self, metrics: Sequence[Metric] = CATALOGUE) -> None:
        self._metrics = tuple(metrics)
        self._heads = tuple((prometheus_head(metric), openmetrics_head(metric, has_unit=True)) for metric in metrics)
        self._index = {metric.name: index for index, metric in enumerate(metrics)}
        self._attributes = {scope: self._attribute_cells(scope) for scope in MetricScope}
        gpu_cells = self._reading_cells(MetricScope.GPU)
        fast = frozenset(FAST_READINGS)
        self._quick = tuple(cell for cell in gpu_cells if cell.reading in fast)
        self._slow = tuple(cell for cell in gpu_cells if cell.reading not in fast)
        self._host = self._reading_cells(MetricScope.HOST)
        self._instance = self._reading_cells(MetricScope.INSTANCE)
        self._rows: dict[tuple[MetricScope, tuple[str, ...], bool], tuple[_Row, ...]] = {}
        self._used: dict[tuple[MetricScope, tuple[str, ...], bool], tuple[_Row, ...]] = {}
        self._layouts: dict[str, tuple[object, list[tuple[int, str]]]] = {}
        self._names: dict[tuple[int, tuple[str, ...]], str] = {}
        self._coded: dict[tuple[tuple[str, ...], int], str] = {}

    def render_snapshot(self, frame: AgentSnapshot) -> RenderedMetrics:
        """The page of this frame."""
        page: list[list[str]] = [[] for _ in self._metrics]
        self._attribute(page, MetricScope.AGENT, (), frame.agent)
        if frame.agent.process is not None:
            self._attribute(page, MetricScope.PROCESS, (), frame.agent.process)
        if frame.agent.worker is not None:
            self._attribute(page, MetricScope.WORKER, (), frame.agent.worker)
        self._used = {}
        if frame.node is not None:
            self._node(page, frame.node)
        # What left the node leaves the cache with it.
        self._rows = self._used
        return RenderedMetrics(
            tuple((*self._heads[index], "".join(lines)) for index, lines in enumerate(page) if lines)
        )

    def _node(self, page: list[list[str]], node: NodeMetricsView) -> None:
        self._attribute(page, MetricScope.NODE, (), node)
        self._attribute(page, MetricScope.HOST, (), node.host)
        self._read(page, MetricScope.HOST, (), self._host, node.host.values, absent_name=HOST_ABSENT)
        if node.guard is not None:
            self._attribute(page, MetricScope.GUARD, (), node.guard)
        for view in node.gpus:
            self._gpu(page, view)
        if len(self._layouts) > len(node.gpus):
            present = {view.gpu.uuid for view in node.gpus}
            self._layouts = {uuid: kept for uuid, kept in self._layouts.items() if uuid in present}
        self._attribute(page, MetricScope.OWNERS, (), node.owners)

    def _gpu(self, page: list[list[str]], view: GpuView) -> None:
        subject = (view.gpu.uuid,)
        self._attribute(page, MetricScope.GPU, subject, view)
        quick = _NOTHING if view.quick is None else view.quick.values
        slow = _NOTHING if view.slow is None else view.slow.values
        self._read(page, MetricScope.GPU, subject, self._quick, quick, absent_name=GPU_ABSENT)
        self._read(page, MetricScope.GPU, subject, self._slow, slow, absent_name=GPU_ABSENT, slow=True)
        for index, lines in self._layout(view):
            page[index].append(lines)
        for instance, values in _instances(view):
            self._read(
                page, MetricScope.INSTANCE, (*subject, instance), self._instance, values, absent_name=INSTANCE_ABSENT
            )

    def _layout(self, view: GpuView) -> list[tuple[int, str]]:
        """Infos of the instances, made anew when the inventory was."""
        uuid, instances = view.gpu.uuid, view.gpu.gpu_instances
        kept = self._layouts.get(uuid)
        if kept is not None and kept[0] is instances:
            return kept[1]
        page: list[list[str]] = [[] for _ in self._metrics]
        for instance in instances:
            subject = (uuid, str(instance.id))
            self._attribute(page, MetricScope.INSTANCE, subject, instance)
            for compute in instance.compute_instances:
                self._attribute(page, MetricScope.COMPUTE, (*subject, str(compute.id)), compute)
        lines = [(index, "".join(found)) for index, found in enumerate(page) if found]
        self._layouts[uuid] = (instances, lines)
        return lines

    def _read(
        self,
        page: list[list[str]],
        scope: MetricScope,
        subject: tuple[str, ...],
        cells: tuple[_Cell, ...],
        values: Mapping[Reading, ReadingValue],
        *,
        absent_name: str,
        slow: bool = False,
    ) -> None:
        """One line for each reading that is there, and one of absence for each that is not."""
        absent: list[str] = []
        for reading, low, high, scale, metric, prefix, cell in self._rows_of(scope, subject, cells, slow=slow):
            value = values.get(reading)
            if value is None:
                reason = _REASONS[AbsenceReason.NOT_SAMPLED]
            elif value.__class__ is Missing:
                reason = _REASONS.get(value.reason, "unspecified")
            elif not low <= value <= high:  # type: ignore[operator]  # also NaN
                reason = _REASONS[AbsenceReason.IMPLAUSIBLE]
            elif prefix.__class__ is str:
                page[metric].append(f"{prefix}{value * scale!r}\n")  # type: ignore[operator]
                continue
            else:
                page[metric].append(self._states(cell, prefix, int(value)))  # type: ignore[arg-type]
                continue
            absent.append(f'reading="{cell.label}",reason="{reason}"}} 1.0\n')
        if absent:
            head = f"{absent_name}{{{format_labels(scope.labels, subject)}{',' if subject else ''}"
            page[self._index[absent_name]].extend([head + line for line in absent])

    def _states(self, cell: _Cell, prefixes: tuple[str, ...], code: int) -> str:
        """The lines of one code, which stays the same for long."""
        lines = self._coded.get((prefixes, code))
        if lines is None:
            if len(self._coded) >= _CODES_MOST:
                self._coded.clear()
            held = self._metrics[cell.metric].split_code(code)
            lines = self._coded[prefixes, code] = "".join(
                [f"{prefix}{'1.0' if holds else '0.0'}\n" for prefix, holds in zip(prefixes, held, strict=True)]
            )
        return lines

    def _rows_of(
        self, scope: MetricScope, subject: tuple[str, ...], cells: tuple[_Cell, ...], *, slow: bool
    ) -> tuple[_Row, ...]:
        key = (scope, subject, slow)
        rows = self._rows.get(key)
        if rows is None:
            rows = tuple(
                (cell.reading, cell.low, cell.high, cell.scale, cell.metric, self._prefix(cell, subject), cell)
                for cell in cells
            )
        self._used[key] = rows
        return rows

    def _prefix(self, cell: _Cell, subject: tuple[str, ...]) -> _Prefix:
        metric = self._metrics[cell.metric]
        if not metric.code_names:
            return _series(metric, subject + cell.values)
        return tuple(_series(metric, (*subject, state)) for state in metric.code_names)

    def _attribute(self, page: list[list[str]], scope: MetricScope, subject: tuple[str, ...], view: object) -> None:
        for index, is_info, take, scale in self._attributes[scope]:
            found: Any = take(view)
            if found is None:
                continue
            is_mapping = found.__class__ not in _NUMBERS and isinstance(found, Mapping)
            if is_info:
                page[index].append(f"{self._name(index, (*subject, *map(_text, found)))}1.0\n")
            elif is_mapping:
                self._mapping(page[index], index, subject, found, scale)
            else:
                page[index].append(f"{self._name(index, subject)}{format_number(float(found) * scale)}\n")

    def _mapping(
        self, lines: list[str], index: int, subject: tuple[str, ...], found: Mapping[Any, Any], scale: float
    ) -> None:
        """One series, or one histogram, for each key."""
        names = self._names
        for key, value in found.items():
            labels = subject + (key if key.__class__ is tuple else (str(key),))
            name = names.get((index, labels)) or self._name(index, labels)
            if value.__class__ is LatencyDistribution:
                lines.extend(_buckets(name, value))
            else:
                lines.append(f"{name}{format_number(value * scale)}\n")

    def _name(self, index: int, values: tuple[str, ...]) -> str:
        """Name and labels of one series, made once."""
        key = (index, values)
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= _NAMES_MOST:
                self._names.clear()
            name = self._names[key] = _series(self._metrics[index], values)
        return name

    def _reading_cells(self, scope: MetricScope) -> tuple[_Cell, ...]:
        return tuple(
            _Cell(
                metric=index,
                reading=reading,
                label=reading.name.lower(),
                low=READING_RANGES[reading].low,
                high=READING_RANGES[reading].high,
                scale=source.scale,
                values=source.labels,
            )
            for index, metric in enumerate(self._metrics)
            if metric.scope is scope
            for source, reading in _reading_sources(metric)
        )

    def _attribute_cells(self, scope: MetricScope) -> tuple[tuple[int, bool, Any, float], ...]:
        """How each metric of a scope takes what it shows from the scope's view."""
        cells: list[tuple[int, bool, Any, float]] = []
        for index, metric in enumerate(self._metrics):
            if metric.scope is not scope:
                continue
            if metric.kind is MetricType.INFO:
                take = attrgetter(*(path for _, path in metric.facts))
                cells.append((index, True, take if len(metric.facts) > 1 else _alone(take), 1.0))
            cells += [(index, False, attrgetter(s.of), s.scale) for s in metric.sources if isinstance(s.of, str)]
        return tuple(cells)


_NUMBERS = frozenset({float, int, bool})
_REASONS = {reason: reason.name.lower() for reason in AbsenceReason}


def _alone(take: Any) -> Any:
    return lambda view: (take(view),)


def _reading_sources(metric: Metric) -> Iterator[tuple[MetricSource, Reading]]:
    for source in metric.sources:
        if isinstance(source.of, Reading):
            yield source, source.of


def _instances(view: GpuView) -> Iterator[tuple[str, Mapping[Reading, ReadingValue]]]:
    """Each GPU instance of the inventory or of the look, once: one that was not looked at yet says so."""
    looks: dict[int, InstanceReadings] = {look.gpu_instance_id: look for look in view.instances}
    for number in sorted({*looks, *(instance.id for instance in view.gpu.gpu_instances)}):
        yield str(number), looks[number].values if number in looks else _NOTHING


def _buckets(series: str, value: LatencyDistribution) -> list[str]:
    """The lines of one histogram, from the name and labels of its series."""
    name, _, labels = series.rstrip().rstrip("}").partition("{")
    lines = [
        f'{name}_bucket{{{labels},le="{bound}"}} {float(below)!r}\n'
        for bound, below in zip(_BUCKETS, value.below, strict=True)
    ]
    lines.append(f"{name}_count{{{labels}}} {float(value.below[-1])!r}\n")
    lines.append(f"{name}_sum{{{labels}}} {format_number(float(value.sum_s))}\n")
    return lines


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _series(metric: Metric, values: tuple[str, ...]) -> str:
    """Name and labels of one series, up to its number."""
    labels = format_labels(metric.all_labels, values)
    return f"{metric.name}{{{labels}}} " if labels else f"{metric.name} "
