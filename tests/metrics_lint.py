"""Prometheus' conventions for a page of ours: what `promtool check metrics` finds, and what it does not.

Owns the lists of units and of words that a name may end in. promtool 2.42 says nothing of `_W`,
of per cent or of a label that grows with the cluster; these rules do. Sources: "Metric and label
naming" and "Instrumentation" of Prometheus' documentation.
"""

import re
import subprocess
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

UNITS = (
    "watts",
    "joules",
    "grams",
    "money",
    "bytes",
    "bytes_per_second",
    "seconds",
    "hertz",
    "celsius",
    "ratio",
    "per_joule",
)
# What has no unit counts these things.
COUNTED = {
    "batches",
    "calls",
    "changes",
    "checkpoints",
    "commits",
    "connected",
    "connections",
    "cpus",
    "cycles",
    "devices",
    "elements",
    "jumps",
    "parts",
    "raises",
    "duplicate",
    "entries",
    "epoch",
    "errors",
    "events",
    "failures",
    "faults",
    "fds",
    "gpus",
    "hangs",
    "ignored",
    "jobs",
    "lanes",
    "links",
    "lists",
    "lost",
    "nodes",
    "notes",
    "objects",
    "out",
    "pages",
    "pinned",
    "processes",
    "queued",
    "read",
    "received",
    "recreated",
    "refused",
    "refusals",
    "repairs",
    "replays",
    "replicas",
    "reviews",
    "revision",
    "rollbacks",
    "rounds",
    "rows",
    "samples",
    "sent",
    "services",
    "answered",
    "commands",
    "starts",
    "threads",
    "ticks",
    "unreadable",
    "unschedulable",
    "waiting",
    "watches",
    "way",
    "windows",
    "workloads",
    "writes",
}
# What is 0 or 1, or a code.
STATES = {
    "absent",
    "action",
    "active",
    "anomaly",
    "cordoned",
    "enabled",
    "enforcing",
    "epoch",
    "failed",
    "generation",
    "interpreted",
    "withheld",
    "leading",
    "pending",
    "quarantined",
    "state",
    "suspended",
    "timeline",
    "unmet",
    "up",
    "writable",
}
NOT_BASE = re.compile(
    r"milli|micro|kilo|mega|giga|mib|gib|percent|pct|fahrenheit|minutes|hours|kwh|mhz|ghz|"
    r"(_mw|_kw|_mj|_kj|_ms|_us|_ns|_w|_c|_j|_s|_hz|_b|_kb|_mb|_gb)(_total)?$",
    re.IGNORECASE,
)
# They name people, never come again, or are the scraper's own: `job` and `instance` of a page that is scraped with
# honor_labels would take the place of the target's.
NO_LABELS = {
    "pid",
    "command_line",
    "cmd",
    "user",
    "username",
    "image",
    "hostname",
    "host",
    "instance",
    "job",
    "job_name",
}
BEGINS = ("eelgrid_", "process_")


def documented(page):
    """Names in the tables of a page of the docs."""
    return set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE))


def named_wrongly(name, kind):
    """What is wrong with a name, in words."""
    bare = name.removesuffix("_total").removesuffix("_info")
    if not re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name) or not name.startswith(BEGINS):
        yield f"{name}: lower case with underscores, and ours begin with {' or '.join(BEGINS)}"
    if NOT_BASE.search(bare):
        yield f"{name}: no base unit"
    if name.endswith("_total") is not (kind == "counter"):
        yield f"{name}: counters end in _total and nothing else does, but it is a {kind}"
    if re.search(r"gauge|counter|histogram|summary", name):
        yield f"{name}: its kind is in its name"
    has_unit = bare.endswith(tuple(f"_{unit}" for unit in UNITS))
    if not has_unit and not name.endswith("_info") and bare.rpartition("_")[2] not in COUNTED | STATES:
        yield f"{name}: ends in no unit that is known, nor in what it counts"


def faults(text, docs, most=None):
    """Everything that is wrong with a page, in words; `most` gives the bound of series by name."""
    shown, seen = documented(docs), Counter()
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        yield from named_wrongly(name, family.type)
        seen[name] += 1
        if len(family.documentation.strip()) < 5:
            yield f"{name}: has no help"
        if name not in shown:
            yield f"{name}: is not in the docs"
        keys = [(sample.name, *sorted(sample.labels.items())) for sample in family.samples]
        yield from (f"{name}: {key} twice" for key, count in Counter(keys).items() if count > 1)
        labels = {label for sample in family.samples for label in sample.labels}
        yield from (f"{name}: label {label}" for label in labels & NO_LABELS)
        if most is not None and len(keys) > most(name):
            yield f"{name}: {len(keys)} series, bound is {most(name)}"
    yield from (f"{name}: {count} heads" for name, count in seen.items() if count > 1)


def run_promtool(text):
    """The exit code of `promtool check metrics` on a page, and what it prints."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=30, text=True)
    return done.returncode, done.stdout + done.stderr
