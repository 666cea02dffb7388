"""Whatever a label or a number is, what is rendered reads back as it was."""

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from eelgrid_agent.metrics.access import BasicAuthenticator, PasswordVerdict
from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_agent.metrics.server import accepts_gzip, prefers_openmetrics
from eelgrid_agent.metrics.snapshot import AgentSnapshot, AgentView

# A line ends where str.splitlines says to these parsers' readers; Prometheus itself ends one at a newline only.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)
NUMBERS = st.floats(allow_nan=False)


def rendered(looks):
    agent = AgentView(
        version="1",
        nodes=0,
        connected_nodes=0,
        samples=0,
        batches=0,
        dropped_samples=0,
        connections=0,
        uncounted_s=0.0,
        spool_ticks=0,
        batches_under_way=0,
        collection_s=looks,
    )
    return MetricsRenderer().render_snapshot(AgentSnapshot(agent=agent))


@given(st.dictionaries(TEXTS, NUMBERS, min_size=1, max_size=5))
def test_labels_and_numbers_read_back(looks):
    page = rendered(looks)
    for parse, text in ((parse_text, page.prometheus()), (parse_openmetrics, page.openmetrics())):
        found = {
            sample.labels["look"]: sample.value
            for family in parse(text.decode())
            for sample in family.samples
            if sample.name == "eelgrid_agent_collection_duration_seconds"
        }
        assert found == looks


@given(st.text(max_size=80))
def test_no_header_is_too_odd(header):
    assert prefers_openmetrics(header) in (True, False)
    assert accepts_gzip(header) in (True, False)


@settings(deadline=None)  # bcrypt
@given(st.lists(st.integers(0, 3), max_size=40))
def test_strangers_get_no_more_hashes_than_the_bound(gaps):
    """At most four new passwords in any second, whoever asks."""
    now_ns, checked = 0, []
    credentials = BasicAuthenticator(secret=b"k", monotonic_ns=lambda: now_ns)
    hashed = "$2b$04$abcdefghijklmnopqrstuuqaAl9ktEIPj2NAqA75U6nyFa4K.2Hda"
    for index, gap in enumerate(gaps):
        now_ns += gap * 250_000_000
        if credentials.check_password({"a": hashed}, "a", str(index).encode()) is not PasswordVerdict.TOO_MANY:
            checked.append(now_ns)
    for first, fifth in zip(checked, checked[4:], strict=False):
        assert fifth - first >= 1_000_000_000
