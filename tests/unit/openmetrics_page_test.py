"""The page's text is read as what the client library's own writer says, in both formats."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from eelgrid_protos.openmetrics import (
    MetricDescription,
    MetricFamily,
    MetricType,
    render_openmetrics,
    render_prometheus,
)

# A line ends where str.splitlines says to these parsers' readers; Prometheus itself ends one at a newline only.
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")) | st.sampled_from('\n"\\'), max_size=20)
NUMBERS = st.floats() | st.integers(-(2**60), 2**60)


def own(said, numbers, labels):
    """Families of ours, of every kind and up to three labels, which are not described in the order of their names."""
    positive = [abs(value) if value == value else 0.0 for value in numbers]
    return [
        MetricFamily(
            MetricDescription("eelgrid_two", MetricType.GAUGE, said, ("b", "a")),
            {(labels[0], f"{labels[1]}{number}"): value for number, value in enumerate(numbers)},
        ),
        MetricFamily(
            MetricDescription("eelgrid_three", MetricType.GAUGE, said, ("c", "a", "b")),
            {(labels[1], str(number), labels[0]): value for number, value in enumerate(numbers)},
        ),
        MetricFamily(
            MetricDescription("eelgrid_one_total", MetricType.COUNTER, said, ("of",)),
            {(f"{labels[0]}{number}",): value for number, value in enumerate(positive)},
        ),
        MetricFamily(
            MetricDescription("eelgrid_alone", MetricType.GAUGE, said),
            dict.fromkeys([()], numbers[0]) if numbers else {},
        ),
        MetricFamily(MetricDescription("eelgrid_ours_info", MetricType.INFO, said, ("version",)), {(labels[1],): 1.0}),
    ]


def registry(said, numbers, labels, seen):
    made = CollectorRegistry()
    duration = Histogram("eelgrid_d_seconds", said, ("of",), buckets=(0.001, 1.0), registry=made)
    for value, exemplar in seen:
        duration.labels("x").observe(value, {"workload": exemplar} if exemplar else None)

    class Others:
        def describe(self):
            return []

        def collect(self):
            gauge = GaugeMetricFamily("eelgrid_g", said, labels=("a", "b"))
            counter = CounterMetricFamily("eelgrid_c", said, labels=("a",))
            for number, value in enumerate(numbers):
                gauge.add_metric((labels[0], f"{labels[1]}{number}"), value)
                counter.add_metric((f"{labels[0]}{number}",), abs(value) if value == value else 0.0)
            yield gauge
            yield counter
            yield InfoMetricFamily("eelgrid_i", said, value={"version": labels[1]})
            yield GaugeMetricFamily("eelgrid_none", "No series")
            yield from own(said, numbers, labels)

    made.register(Others())
    return made


def read(parse, text):
    return [
        (
            family.name,
            family.type,
            family.documentation,
            sample.name,
            sample.labels,
            "nan" if math.isnan(sample.value) else sample.value,
            sample.exemplar
            and (sample.exemplar.labels, sample.exemplar.value, round(float(sample.exemplar.timestamp), 2)),
        )
        for family in parse(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


@settings(deadline=None)
@given(
    TEXTS,
    st.lists(NUMBERS, max_size=4),
    st.tuples(TEXTS, TEXTS),
    st.lists(st.tuples(st.floats(0.0, 10.0), st.sampled_from(["", "w-1", "ns/pod.7:a"])), max_size=4),
)
def test_what_is_written_is_read_as_the_librarys_own(said, numbers, labels, seen):
    made = registry(said, numbers, labels, seen)
    families = list(made.collect())
    for one in (one for one in families if not isinstance(one, MetricFamily)):
        one.samples = [sample for sample in one.samples if not sample.name.endswith("_created")]
    ours = read(parse_text, render_prometheus(families))
    assert ours == [(*row[:-1], None) for row in read(parse_text, generate_latest(made))]
    assert read(parse_openmetrics, render_openmetrics(families)) == read(parse_openmetrics, generate_openmetrics(made))
    if any(exemplar for _, exemplar in seen[-1:]):
        assert b" # {workload=" in render_openmetrics(families)
        assert b" # {workload=" not in render_prometheus(families)
