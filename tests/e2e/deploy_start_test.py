"""The chart's pods start as the chart writes them: user, read-only root, volumes, certificates and probes, without a kubelet."""

import json
import sys

import pytest
import yaml
from tests.certificates_rig import Authority
from tests.deploy_rig import needs_helm, pick, render
from tests.e2e.processes import fleet_of
from tests.pod_rig import Pods, find_obstacle
from tests.waiting import poll_until

pytestmark = needs_helm

VALUES = {
    "tls": {"mode": "secret", "roles": "require"},
    "controller": {
        "kubernetes": {"enabled": False},
        # All pods have one network here, in which the controller's metrics and probes give way to those of ingest.
        "extraArgs": ["--metrics=0.0.0.0:9470", "--probes=0.0.0.0:9471"],
    },
    "ingest": {"enabled": True},
    "front": {
        "enabled": True,
        "clusters": {"here": "eelgrid-controller.eelgrid.svc:7443"},
        "page": {"enabled": True},
    },
}
PORTS = {"eelgrid-controller": {"metrics": 9470, "probes": 9471}}
KINDS = {"eelgrid-controller": "Deployment", "eelgrid-ingest": "Deployment", "eelgrid-front": "StatefulSet"}
GRACE = "terminationGracePeriodSeconds"
# The role of each party's certificate.
PARTIES = {"controller": None, "ingest": "ingest", "front": "admin", "operator": "admin", "agent": "agent"}
NODE = {"name": "n1", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}


@pytest.fixture
def objects(tmp_path):
    """The release."""
    if why := find_obstacle():
        pytest.skip(why)
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(VALUES))
    return [found for found in yaml.load_all(render.rendered(str(path)), render.LOADER) if found]


def make_certificates(folder):
    """The files of each party by the names that a Secret gives them, from one authority."""
    authority = Authority()
    for party, role in PARTIES.items():
        subject = [("CN", f"eelgrid-{party}"), *([("O", f"eelgrid:{role}")] if role else [])]
        files = authority.write(folder / party, *subject, names=(f"eelgrid-{party}.eelgrid.svc",))
        names = {"tls.crt": files.certificate, "tls.key": files.key, "ca.crt": files.authority}
        yield f"eelgrid-{party}-tls", {name: path.read_bytes() for name, path in names.items()}


def build_flags(party):
    """The certificate of a program that runs beside the pods."""
    files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
    return [word for name, file in files.items() for word in (f"--tls-{name}", f"/etc/{party}/{file}")]


def test_a_front_a_controller_and_an_ingest_process_start_and_place_work(objects, tmp_path):
    secrets = dict(make_certificates(tmp_path))
    services = [f"{one['metadata']['name']}.eelgrid.svc" for one in objects if one["kind"] == "Service"]
    with Pods(tmp_path, services) as pods:
        started = {
            name: pods.start(pick(objects, kind, name), secrets, ports=PORTS.get(name, {}))
            for name, kind in KINDS.items()
        }
        for pod in started.values():
            pod.until_ready()

        def mount(party):
            return pods.make_volume(f"{party}-tls", secrets[f"eelgrid-{party}-tls"]), f"/etc/{party}", True

        def call(*words):
            program = [sys.executable, "-m", "eelgrid_controller.cli", "--controller", "eelgrid-front.eelgrid.svc:7445"]
            done = pods.run("eelctl", [*program, *build_flags("operator"), *words], mounts=(operator,))
            assert done.process.wait() == 0, done.log.read_text()
            return done.log.read_text()

        operator, folder = mount("operator"), tmp_path / "fleet"
        folder.mkdir()
        fleet_of(folder / "fleet.json", [NODE])
        pods.run(
            "agent",
            [
                sys.executable, "-m", "eelgrid_agent", "--controller", "eelgrid-ingest.eelgrid.svc:7444", *build_flags("agent"),
                "--simulate", "/etc/fleet/fleet.json", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
            ],
            mounts=(mount("agent"), (folder, "/etc/fleet", True)),
        )  # fmt: skip

        def find_cluster():
            (cluster,) = json.loads(call("clusters", "-o", "json"))
            return cluster

        poll_until(lambda: find_cluster()["summary"].get("gpus") == 2, "the agent is there, behind ingest")
        call("submit", "--id", "job", "--name", "job", "--gpus", "2", "--cpu", "1", "--memory", "1GiB")
        poll_until(lambda: find_cluster()["summary"].get("placed") == 1, "the job is placed")
        for name, pod in started.items():
            assert pod.process.poll() is None, name
            assert "Read-only file system" not in pod.log.read_text()
            # As the kubelet ends it, within its grace.
            pod.process.terminate()
            assert pod.process.wait(pick(objects, KINDS[name], name)["spec"]["template"]["spec"][GRACE]) == 0, name
