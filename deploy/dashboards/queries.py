"""PromQL in pieces: selectors that always name job and instance, and joins that give a device its name.

Owns how a query of ours is put together. Must not know panels. A device's series have its UUID
alone, and a plain Prometheus does not know an agent's node: both come from info series by joins
on what cannot be ambiguous, so that a query gives the same behind a PodMonitor and without one.
"""

__all__ = [
    "ENERGY_TODAY",
    "RATE",
    "by_device",
    "by_node",
    "each_device",
    "increase",
    "of",
    "or_none",
    "owned",
    "quantile",
    "rate",
    "some",
]

# Joules since midnight (UTC) by namespace, as the controller reads them from the energy ledger; of several controllers
# the one that leads.
ENERGY_TODAY = 'max by (namespace, part) (eelgrid_energy_today_joules{job=~"$job", instance=~"$instance"})'
# What Grafana makes four scrapes long at least, so that a rate never stands on one sample.
RATE = "$__rate_interval"
_SCRAPED = 'job=~"$job", instance=~"$instance"'


def of(metric: str, matchers: str = "") -> str:
    """The series of a metric in the chosen jobs and instances."""
    return f"{metric}{{{_SCRAPED}{', ' if matchers else ''}{matchers}}}"


def rate(metric: str, matchers: str = "") -> str:
    """A counter's rate per second."""
    return f"rate({of(metric, matchers)}[{RATE}])"


def increase(metric: str, matchers: str = "", *, over: str = RATE) -> str:
    """By how much a counter rose."""
    return f"increase({of(metric, matchers)}[{over}])"


def owned(matchers: str, over: str = RATE) -> str:
    """The selector of energy by owner, over a time."""
    return f"{of('eelgrid_workload_gpu_energy_joules_total', matchers)}[{over}]"


def quantile(share: float, histogram: str, *, by: str = "") -> str:
    """A quantile of a histogram, over all instances."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rate(histogram + '_bucket')}))"


def by_node(expression: str) -> str:
    """The same with the label `node`, of the nodes chosen."""
    info = of("eelgrid_node_info", 'node=~"$node"')
    return f"{expression} * on (job, instance) group_left (node) {info}"


def by_device(expression: str) -> str:
    """The same with `node`, `index` and `model`, of the nodes and devices chosen; it must keep `gpu`."""
    info = of("eelgrid_gpu_info", 'gpu=~"$gpu"')
    return by_node(f"{expression} * on (job, instance, gpu) group_left (index, model) {info}")


def each_device(expression: str, *kept: str) -> str:
    """One series of each device, named by `device` and what is kept, and so in the order of nodes and indexes."""
    labels = ", ".join(("device", *kept))
    return f'max by ({labels}) (label_join({by_device(expression)}, "device", " gpu ", "node", "index"))'


def or_none(expression: str, label: str) -> str:
    """The same, and while it has nothing one series of zeros named none: a timeline of nothing is an error to Grafana."""
    return f'{expression} or on () label_replace(vector(0), "{label}", "none", "", "")'


def some(expression: str, label: str) -> str:
    """What is above zero; where all is zero, one series of zeros named none, so that legends name what there is."""
    return f'({expression}) > 0 or label_replace(sum({expression}) == 0, "{label}", "none", "", "")'
