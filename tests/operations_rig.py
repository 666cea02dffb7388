"""A small cluster with work in every state, for tests of what operators type, and eelctl in this process.

Owns the cluster: one controller; simulated nodes, one of them lost, one of them with a lost GPU, one partitioned; work
that is placed, waits, has an objective, or has lost its GPU or its node. Must not know which commands a test runs.
"""

import json
import shutil

import click
import yaml
from click.testing import CliRunner

from eelgrid_controller.cli.__main__ import cli
from tests.docs_rig import DOCS, GUIDES, blocks_of
from tests.e2e.processes import Cluster, fleet_of

CPU, MEMORY = 192_000, 2**41
# Nodes as pages name them: gpu-1 and gpu-2 have work, n7 is lost, m-1 is partitioned.
PRESENT = (
    {"name": "gpu-1", "topology": "r1", "gpus": [{"product": "h100-sxm5-80gb", "count": 8}]},
    {"name": "gpu-2", "topology": "r1", "gpus": [{"product": "a100-sxm4-80gb", "count": 8}]},
    {"name": "m-1", "pool": "slices", "gpus": [{"product": "a100-sxm4-40gb", "count": 1, "mig": []}]},
)
ABSENT = ({"name": "n7", "gpus": [{"product": "a10", "count": 2}]},)
# Work by what became of it.
PLACED, WAITING, ON_LOST_GPU, ON_LOST_NODE, ENDED, SERVICE, JOB = (
    "batch", "later", "hurt", "away", "done", "chat", "train",
)  # fmt: skip
MODEL = "H100-80GB-HBM3"


def eelctl_here(*arguments, address, folder=None, stdin=None):
    """One run of eelctl in this process, as a user would run it; what it does not catch is raised."""
    result = CliRunner().invoke(
        cli, ["--controller", address, *map(str, arguments)], prog_name="eelctl", input=stdin or ""
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"eelctl {' '.join(map(repr, arguments))} ended in a traceback") from result.exception
    return result


def find_commands(group=cli, path=()):
    """Every command of eelctl that does something by itself, by its full name."""
    context, found = click.Context(group), {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            found[" ".join((*path, name))] = command
        if isinstance(command, click.Group):
            found |= find_commands(command, (*path, name))
    return found


class BusyCluster(Cluster):
    """A cluster whose objects are in every state that an operator meets."""

    def type(self, *arguments, stdin=None):
        """One run of eelctl in this process against this cluster; whatever comes of it."""
        return eelctl_here(*arguments, address=self.address, stdin=stdin)

    def done(self, *arguments):
        """The same, where it must end well; what it printed."""
        result = self.type(*arguments)
        assert result.exit_code == 0, f"eelctl {arguments}: {result.output}"
        return result.stdout

    def prepare(self):
        """Starts everything and waits until each object is in its state."""
        self.controller("--away-grace", "0.5", "--steer-interval", "1", "--page", "127.0.0.1:0")
        self.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
        faults = self.folder / "faults"
        faults.write_text("")
        for name, nodes in (("present", PRESENT), ("absent", ABSENT)):
            fleet = [{"cpu_milli": CPU, "memory_bytes": MEMORY, **node} for node in nodes]
            agent = self.agent(fleet_of(self.folder / f"{name}.json", fleet), "--faults", str(faults))
            if name == "present":
                self.node_address = self.agents[agent]["listen"]
        self.until_ready(len(PRESENT) + len(ABSENT))
        self.done("policy", "set", "--yes", "--pool-mode", "slices=enforce", "--partition", "slices=on")
        self.done("profile", "import", DOCS / "examples" / "frontier-points.csv")
        for page in GUIDES:
            for block in blocks_of(page):
                if block.is_file:
                    (self.folder / block.title).write_text(block.text)
        shutil.copy(DOCS / "examples" / "frontier-points.csv", self.folder / "points.csv")
        shutil.copy(DOCS / "examples" / "frontier-services.yaml", self.folder / "services.yaml")
        # The job fills one of the two big nodes only.
        train = yaml.safe_load((self.folder / "train.yaml").read_text()) | {"replicas": 1}
        train["request"]["gpu_models"] = [MODEL]
        (self.folder / "train-one.yaml").write_text(yaml.safe_dump(train))
        self.done("submit", "-f", self.folder / "train-one.yaml")
        # The profile of which there are points, and a GPU beside the job's.
        chat = yaml.safe_load((self.folder / "chat.yaml").read_text())
        chat["service"]["profile"], chat["request"]["gpu_models"] = "chat", ["A100-SXM4-80GB"]
        (self.folder / "chat-here.yaml").write_text(yaml.safe_dump(chat))
        self.done("submit", "-f", self.folder / "chat-here.yaml")
        work = (
            (PLACED, 1, "A100-SXM4-80GB"),
            (ON_LOST_GPU, 1, "A100-SXM4-80GB"),
            (ON_LOST_NODE, 2, "A10"),
            (WAITING, 1, "A10"),
            (ENDED, 0, ""),
        )
        for name, gpus, model in work:
            flags = ("--gpus", gpus, "--gpu-model", model) if gpus else ()
            self.done("submit", "--id", name, "--name", name, "--cpu", 1, "--user", "ann", *flags)
        self.done("cancel", ENDED)
        (placement,) = json.loads(self.done("get", ON_LOST_GPU, "-o", "json"))["placements"]
        fault = {"fault": "lose", "node": placement["node_name"], "gpu": placement["gpu_indexes"][0]}
        faults.write_text(json.dumps(fault) + "\n")
        agent.kill()
        agent.expected = True
        self.until(
            lambda: self.summary().gpus_lost == 1 and self.summary().nodes_lost == 1, what="a GPU and a node are lost"
        )
        self.until(lambda: SERVICE in self.done("promises"), what="the service is observed")
