"""The agent as on a real machine, with its driver in a child process that simulates the devices.

    python -m bench.worker_agent SCENE [eelgrid-agent's own flags]

SCENE is the file of eelgrid_agent.simulation.driver_scene. `eelgrid-agent --simulate`
has its devices in the agent's own process, so it does not show the cost of
the child, the communication with it, and the machine's own readings.
"""

import sys

from eelgrid_agent.__main__ import main as agent  # first, as in the agent: it decides what is loaded

# isort: split
from eelgrid_agent import composition
from eelgrid_agent.devices.process.remote_device import RemoteDevice


def main() -> int:
    """Becomes the agent."""
    scene = sys.argv[1]
    composition.RemoteDevice = lambda _factory: RemoteDevice("simulated", scene)  # type: ignore[misc,assignment]
    return agent([*sys.argv[2:], "--vendor", "nvidia"])


if __name__ == "__main__":
    sys.exit(main())
