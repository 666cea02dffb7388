"""A real control plane and a real kubelet: one that stands, or one that is started for these tests and ended after them.

EELGRID_KUBELET_DIR with K8S_API, K8S_CA, K8S_TOKEN and K8S_NODE name one that stands; K8S_HOME names a
folder with up.sh, kubelet-up.sh and down.sh that start one (its README is its own). Without either
all of this is skipped. A kubelet's folder must have a short path, for its sockets' sake.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.kubelet_rig import RealCluster

_NEEDED = ("K8S_API", "K8S_CA", "K8S_TOKEN", "EELGRID_KUBELET_DIR")


def pytest_collection_modifyitems(items):
    is_there = bool(os.environ.get("K8S_HOME") or all(map(os.environ.get, _NEEDED)))
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.kubelet)
            if not is_there:
                item.add_marker(pytest.mark.skip(reason="neither K8S_HOME nor EELGRID_KUBELET_DIR names a kubelet"))


@pytest.fixture(scope="session")
def real():
    if os.environ.get("EELGRID_KUBELET_DIR"):
        found = RealCluster.of(os.environ, os.environ["EELGRID_KUBELET_DIR"], os.environ.get("K8S_NODE", "k1"))
        yield found
        found.close()
        return
    home = Path(os.environ["K8S_HOME"])
    with tempfile.TemporaryDirectory(prefix="eel", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "r"
        try:
            subprocess.run(["bash", home / "up.sh", run], check=True, timeout=180, stdout=subprocess.DEVNULL)
            script = f". {run}/env && exec bash {home}/kubelet-up.sh k1 >&2 && env"
            subprocess.run(["bash", "-c", script], check=True, timeout=180, stderr=subprocess.DEVNULL)
            said = subprocess.run(
                ["bash", "-c", f". {run}/env && env"], check=True, capture_output=True, text=True, timeout=20
            )
            known = dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)
            found = RealCluster.of(known, run / "k1", "k1")
            yield found
            found.close()
        finally:
            subprocess.run(["bash", home / "down.sh", run], check=False, timeout=60, stdout=subprocess.DEVNULL)
