"""A real Prometheus beside the demo, where one is installed.

Owns its configuration, where its rules come from, and when it counts as ready.
Must not know what it scrapes beyond the addresses, and starts nothing itself.
What it keeps lies in the demo's temporary folder and ends with it.
"""

import asyncio
import shutil
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

__all__ = ["command", "configuration", "program", "ready", "rules_file"]

# As dense as the agents' batches, so that graphs fill while somebody looks.
SCRAPE_S = 5
_READY_S = 30.0
_LOOK_S = 0.2
_RETENTION = "6h"
_RULES = Path("deploy/helm/eelgrid/files/rules.yaml")


def program() -> str | None:
    """The path of Prometheus; None where it is not installed."""
    return shutil.which("prometheus")


def rules_file() -> Path | None:
    """The chart's rules, where the demo runs from the sources; an installed package has none."""
    found = Path(__file__).resolve().parents[3] / _RULES
    return found if found.is_file() else None


def configuration(targets: Mapping[str, Sequence[str]], rules: Path | None, *, scrape_s: int = SCRAPE_S) -> str:
    """Prometheus' configuration: jobs of addresses, under the names that the chart gives its jobs."""
    jobs = [
        # Our own labels of nodes and pods stay, as the chart's monitors have it.
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": list(addresses)}]}
        for name, addresses in targets.items()
    ]
    times = {"scrape_interval": f"{scrape_s}s", "scrape_timeout": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"}
    return yaml.safe_dump(
        {"global": times, "scrape_configs": jobs, "rule_files": [] if rules is None else [str(rules)]}, sort_keys=False
    )


def command(path: str, configured: Path, folder: Path, address: str) -> list[str]:
    """How it is started: on the loopback, without its console pages, keeping some hours."""
    return [
        path, f"--config.file={configured}", f"--storage.tsdb.path={folder}", f"--web.listen-address={address}",
        f"--storage.tsdb.retention.time={_RETENTION}", "--log.level=warn",
    ]  # fmt: skip


async def ready(address: str) -> bool:
    """Whether it answers within half a minute."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        if await asyncio.to_thread(_is_ready, address):
            return True
        await asyncio.sleep(_LOOK_S)
    return False


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
