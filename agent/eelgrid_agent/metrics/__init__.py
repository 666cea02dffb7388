"""Prometheus endpoint of the agent: collector, snapshot, metric catalogue, exposition format and HTTP server."""

from eelgrid_agent.metrics.access import MetricsError, WebConfigUnusable
from eelgrid_agent.metrics.catalogue import CATALOGUE
from eelgrid_agent.metrics.collector import AgentCollector, time_calls
from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_agent.metrics.server import MetricsEndpoint, ScrapeHandler
from eelgrid_agent.metrics.snapshot import AgentSnapshot

__all__ = [
    "CATALOGUE",
    "AgentCollector",
    "AgentSnapshot",
    "MetricsEndpoint",
    "MetricsError",
    "MetricsRenderer",
    "ScrapeHandler",
    "WebConfigUnusable",
    "time_calls",
]
