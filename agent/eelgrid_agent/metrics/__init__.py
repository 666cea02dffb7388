"""Prometheus endpoint of the agent: collector, snapshot, exposition format and HTTP server."""

from eelgrid_agent.metrics.access import MetricsError, WebConfigUnusable
from eelgrid_agent.metrics.collector import AgentCollector, time_calls
from eelgrid_agent.metrics.exposition import MetricsRenderer
from eelgrid_agent.metrics.server import MetricsEndpoint, ScrapeHandler
from eelgrid_agent.metrics.snapshot import AgentSnapshot
from eelgrid_protos.agent_metrics import CATALOGUE

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
