"""The Prometheus endpoint: what the agent knows, in base units, over HTTP.

A frame is what is known at one moment, the catalogue says what of it is shown
and how it is called, the renderer writes it, the page keeps what was written
for as long as it is true, and the server hands it out to whoever may have it.
"""

from eelgrid_agent.metrics.catalogue import CATALOGUE
from eelgrid_agent.metrics.collector import AgentCollector
from eelgrid_agent.metrics.frame import Frame
from eelgrid_agent.metrics.page import Page
from eelgrid_agent.metrics.render import Renderer
from eelgrid_agent.metrics.server import MetricsError, MetricsServer, WebConfigUnusable
from eelgrid_agent.metrics.timing import TimedDevice

__all__ = [
    "CATALOGUE", "AgentCollector", "Frame", "MetricsError", "MetricsServer", "Page", "Renderer",
    "TimedDevice", "WebConfigUnusable",
]  # fmt: skip
