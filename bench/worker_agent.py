"""The agent as it stands on a real machine, its driver in a child process, where the child simulates the devices.

    python -m bench.worker_agent SCENE [eelgrid-agent's own flags]

SCENE is the file of eelgrid_agent.simulation.node_files. `eelgrid-agent --simulate`
has its devices in the agent's own process, so that it alone would not tell what
the child, the way to it, and the machine's own readings cost.
"""

import sys

from eelgrid_agent import composition
from eelgrid_agent.__main__ import main as agent
from eelgrid_agent.devices.process.remote_device import RemoteDevice


def main() -> int:
    """Becomes the agent."""
    scene = sys.argv[1]
    composition.RemoteDevice = lambda _factory: RemoteDevice("simulated", scene)  # type: ignore[misc,assignment]
    return agent([*sys.argv[2:], "--vendor", "nvidia"])


if __name__ == "__main__":
    sys.exit(main())
