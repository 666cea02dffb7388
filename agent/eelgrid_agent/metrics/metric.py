"""Where the numbers of a metric of the agent come from, as data: its subject, and readings or attributes of that.

Owns the vocabulary of the catalogue, on top of `eelgrid_protos.openmetrics`.
Must not know a single metric, nor how any is written down.

Theory. A metric has one subject (its scope), and the scope's labels name the
subject in every series; a metric's own labels come after them. Numbers come
from readings, scaled to the base unit in the name, or from an attribute of the
subject's view in the frame: a number is one series, a mapping is one series
for each of its keys (several labels are a tuple), None is no series. A reading that is a code becomes one
series for each state, and a reading that is a mask one for each bit, 0 or 1:
numbers that mean something else when summed are not shown.
"""

from dataclasses import dataclass
from enum import Enum

from eelgrid_protos.messages import Reading
from eelgrid_protos.openmetrics import MetricDescription, MetricType


class MetricScope(Enum):
    """The subject of a metric; the value is the view of the frame that holds its numbers."""

    AGENT = "AgentView"
    PROCESS = "ProcessView"
    WORKER = "WorkerView"
    NODE = "NodeView"
    HOST = "HostView"
    GUARD = "GuardView"
    GPU = "GpuView"
    INSTANCE = "GpuInstance"
    COMPUTE = "ComputeInstance"
    OWNERS = "OwnersView"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that name the subject."""
        return _SCOPE_LABELS.get(self, ())


# One process serves one machine, which the scraper already names: its own numbers need no label.
_SCOPE_LABELS = {
    MetricScope.GPU: ("gpu",),
    MetricScope.INSTANCE: ("gpu", "gpu_instance"),
    MetricScope.COMPUTE: ("gpu", "gpu_instance", "compute_instance"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """One origin of a metric's numbers: a reading, or an attribute of the view, dotted.

    `labels` are the values of the metric's own labels where one reading is one series.
    """

    of: Reading | str
    labels: tuple[str, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(MetricDescription):
    """One metric of the agent.

    `states` turns a code into one series for each state and `bits` a mask into
    one for each bit; what neither names is `other`. `facts` are the label and
    the attribute of each part of an info metric.
    """

    scope: MetricScope
    sources: tuple[MetricSource, ...] = ()
    states: tuple[tuple[int, str], ...] = ()
    bits: tuple[tuple[int, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label of every series, in order."""
        return self.scope.labels + self.labels + tuple(label for label, _ in self.facts)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The readings that it shows."""
        return tuple(source.of for source in self.sources if isinstance(source.of, Reading))


def gpu_metric(
    name: str,
    reading: Reading,
    text: str,
    *,
    kind: MetricType = MetricType.GAUGE,
    scale: float = 1.0,
    states: tuple[tuple[int, str], ...] = (),
    bits: tuple[tuple[int, str], ...] = (),
    labels: tuple[str, ...] = (),
) -> Metric:
    """One reading of a device."""
    return Metric(
        name=f"eelgrid_gpu_{name}",
        kind=kind,
        help=text,
        scope=MetricScope.GPU,
        labels=labels,
        states=states,
        bits=bits,
        sources=(MetricSource(of=reading, scale=scale),),
    )


def labelled_metric(
    name: str, label: str, sources: dict[str, Reading], text: str, *, kind: MetricType, scope: MetricScope
) -> Metric:
    """A metric of several readings of one quantity, distinguished by one label."""
    return Metric(
        name=name,
        kind=kind,
        help=text,
        scope=scope,
        labels=(label,),
        sources=tuple(MetricSource(of=reading, labels=(value,)) for value, reading in sources.items()),
    )


def attribute_metric(
    name: str,
    scope: MetricScope,
    path: str,
    text: str,
    *labels: str,
    kind: MetricType = MetricType.GAUGE,
) -> Metric:
    """An attribute of a view."""
    return Metric(name=name, kind=kind, help=text, scope=scope, labels=labels, sources=(MetricSource(of=path),))


def info_metric(name: str, scope: MetricScope, text: str, **facts: str) -> Metric:
    """What a subject is; each fact is a label and the attribute that it shows."""
    return Metric(name=name, kind=MetricType.INFO, help=text, scope=scope, facts=tuple(facts.items()))


def absence_metric(name: str, scope: MetricScope, text: str) -> Metric:
    """Why readings of a subject have no series; the renderer knows."""
    return Metric(name=name, kind=MetricType.GAUGE, help=text, scope=scope, labels=("reading", "reason"))


def instance_metric(name: str, reading: Reading, text: str) -> Metric:
    """One reading of a GPU instance."""
    return Metric(
        name=f"eelgrid_gpu_instance_{name}",
        kind=MetricType.GAUGE,
        help=text,
        scope=MetricScope.INSTANCE,
        sources=(MetricSource(of=reading),),
    )
