"""A real Prometheus with the shipped rules made faster, and what it says of their alerts.

Owns that process and what it is asked. Must not know who is scraped nor what is wrong there.
"""

import json
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field

import yaml
from deploy.dashboards.reading import ask

from tests.compressed_rules import compressed
from tests.deploy_rig import CHART
from tests.e2e.processes import free_address

RULES = CHART / "files" / "rules.yaml"
# A minute of the rules is a second of a rehearsal.
FACTOR = 60.0
SCRAPE_S = 1.0


def shipped():
    """The rules as they are."""
    return yaml.safe_load(RULES.read_text())


def alert_names():
    """Of every alert that is shipped."""
    return {rule["alert"] for group in shipped()["groups"] for rule in group["rules"] if "alert" in rule}


@dataclass(frozen=True)
class Alert:
    """An alert by its name and those of its labels that matter."""

    name: str
    labels: frozenset = field(default_factory=frozenset)

    def meets(self, labels):
        return labels["alertname"] == self.name and self.labels <= labels.items()

    def __str__(self):
        told = ", ".join(f"{key}={value}" for key, value in sorted(self.labels))
        return f"{self.name}{{{told}}}" if told else self.name


def alert(name, **labels):
    """An alert that is awaited."""
    return Alert(name, frozenset(labels.items()))


class Alerting:
    """The process; a context. `targets` has the addresses of each job."""

    def __init__(self, folder, targets):
        self.folder = folder
        self.address = free_address()
        self._targets = targets
        self._process = None

    def __enter__(self):
        (self.folder / "rules.yaml").write_text(yaml.safe_dump(compressed(shipped(), FACTOR)))
        jobs = [
            {"job_name": job, "honor_labels": True, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in self._targets.items()
        ]
        every = f"{SCRAPE_S:g}s"
        timing = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
        document = {"global": timing, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (self.folder / "prometheus.yml").write_text(json.dumps(document))
        command = [
            "prometheus",
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'tsdb'}",
            f"--web.listen-address={self.address}",
        ]
        with (self.folder / "prometheus.log").open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)
        return self

    def __exit__(self, *reason):
        self._process.terminate()
        self._process.wait()

    def _get(self, path):
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    def is_up(self):
        """Whether it answers, and every target was scraped well the last time."""
        targets = self._get("targets")["activeTargets"]
        return bool(targets) and all(one["health"] == "up" for one in targets)

    def firing(self):
        """The labels of every alert that fires now."""
        return [one["labels"] for one in self._get("alerts")["alerts"] if one["state"] == "firing"]

    def active(self):
        """The labels of every alert that fires now, or will if it lasts."""
        return [one["labels"] for one in self._get("alerts")["alerts"]]

    def fired(self, since_s):
        """The labels of every alert that fired at some evaluation since then."""
        query = 'ALERTS{alertstate="firing"}'
        series = ask(f"http://{self.address}", query, begin_s=since_s, end_s=time.time(), step_s=SCRAPE_S)
        return [dict(one.labels) for one in series]
