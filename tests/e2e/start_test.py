"""Programs that cannot start: each says why and what to do in one line, with its exit code, and harms nothing."""

import shutil
import sqlite3

from tests.e2e.processes import fleet_of, free_address

from eelgrid_protos.messages import GetWorkloadRequest, ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

NODE = {"name": "n", "cpu_milli": 1000, "memory_bytes": 2**30}


def begin(cluster, data, *, listen=None, metrics=None):
    """A controller over a directory, at addresses of its own unless told."""
    return cluster.run(
        "other",
        "-m",
        "eelgrid_controller",
        "--listen",
        listen or free_address(),
        "--metrics",
        metrics or free_address(),
        "--data",
        str(data),
    )


def check(child, code, *words):
    """It ended with this code and one line that holds these words."""
    assert child.ended(within_s=30.0) == code, child.text()
    assert "Traceback" not in child.text(), child.text()
    (line,) = [line for line in child.text().splitlines() if line.startswith("eelgrid-")]
    assert all(word in line for word in words), line


def contents(folder):
    """Every file of a folder with what is in it."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damaged_journals(cluster):
    """Directories that a controller must refuse, and what it must say of each."""
    folders = {}

    def copied(name):
        folder = cluster.folder / name
        shutil.copytree(cluster.data, folder)
        (folder / "controller.lock").unlink()
        return folder

    def changed(name, statement):
        folder = copied(name)
        connection = sqlite3.connect(folder / "journal.sqlite3")
        with connection:
            assert connection.execute(statement).rowcount == 1
        connection.close()
        return folder

    text = cluster.folder / "text"
    text.mkdir()
    (text / "journal.sqlite3").write_text("Dear diary, today nothing happened.\n" * 100)
    folders[text] = ("no SQLite file", "--data")
    foreign = cluster.folder / "foreign"
    foreign.mkdir()
    connection = sqlite3.connect(foreign / "journal.sqlite3")
    connection.executescript("CREATE TABLE diary (day, entry); INSERT INTO diary VALUES (1, 'nothing')")
    connection.close()
    folders[foreign] = ("another program made this SQLite file", "--data")
    flipped = "UPDATE events SET body = replace(body, 'precious', 'precioux') WHERE kind = 'workload_submitted'"
    folders[changed("flipped", flipped)] = ("entry 1 is damaged", "restore a backup")
    empty = copied("empty")
    for path in empty.iterdir():
        path.write_bytes(b"")
    folders[empty] = ("the file is empty", "restore it from a backup")
    return folders


def test_a_controller_that_cannot_have_what_it_needs(cluster):
    controller = cluster.controller()
    spec = WorkloadSpec(name="precious", request=ResourceRequest(cpu_milli=1))
    accepted = cluster.operators.submit_workload(SubmitWorkloadRequest(spec=spec, workload_id="precious"), timeout=5.0)
    taken = begin(cluster, cluster.folder / "fresh", listen=cluster.address)
    measured = begin(cluster, cluster.folder / "fresh2", metrics=cluster.metrics)
    second = begin(cluster, cluster.data)
    nobody = cluster.run("other", "-m", "eelgrid_controller", "--listen", "nowhere", "--data", "d")
    readonly = begin(cluster, "/proc/eelgrid")
    check(taken, 2, f"cannot listen on {cluster.address}", "--listen")
    check(measured, 2, f"cannot serve metrics on {cluster.metrics}", "--metrics")
    check(second, 1, f"another controller (process {controller.process.pid}) has it open", "--data")
    check(nobody, 2, "'nowhere' is no address", "127.0.0.1:7443")
    check(readonly, 2, "/proc/eelgrid cannot be used", "--data")
    get = GetWorkloadRequest(workload_id="precious")
    assert cluster.operators.get_workload(get, timeout=5.0).workload == accepted.workload

    # Killed, so that there is no checkpoint and every entry is read.
    controller.kill()
    cases = damaged_journals(cluster)
    before = {folder: contents(folder) for folder in cases}
    children = {folder: begin(cluster, folder) for folder in cases}
    for folder, words in cases.items():
        check(children[folder], 1, str(folder / "journal.sqlite3"), *words)
        found = contents(folder)
        for name in ("journal.sqlite3", "journal.sqlite3-wal"):
            assert found.get(name, b"") == before[folder].get(name, b""), f"{folder.name}: the journal was touched"

    cluster.controller()
    assert cluster.operators.get_workload(get, timeout=5.0).workload == accepted.workload


def test_an_agent_that_cannot_have_what_it_needs(cluster):
    folder = cluster.folder
    good = fleet_of(folder / "good.json", [NODE])

    def agent(fleet, *arguments):
        addresses = ("--controller", cluster.address, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        return cluster.run("bad-agent", "-m", "eelgrid_agent", *addresses, "--simulate", str(fleet), *arguments)

    (folder / "broken.json").write_text('{"nodes": [')
    odd = fleet_of(folder / "odd.json", [NODE | {"gpus": [{"product": "voodoo-3"}]}])
    negative = fleet_of(folder / "negative.json", [NODE, NODE | {"name": "m", "cpu_milli": -5}])
    check(agent(folder / "absent.json"), 2, "absent.json: cannot be read", "give a fleet file")
    check(agent(folder / "broken.json"), 2, "broken.json: is not JSON", "correct it")
    check(agent(odd), 2, "odd.json: nodes[0].gpus[0].product", "voodoo-3")
    check(agent(negative), 2, "negative.json: nodes[1].cpu_milli", "-5")
    check(agent(fleet_of(folder / "none.json", [])), 2, "none.json: nodes: is empty")
    check(agent(good, "--controller", "192.0.2.1:7443"), 2, "192.0.2.1:7443 is another machine", "--insecure")
    held = cluster.agents[cluster.agent(good)]
    check(agent(good, "--listen", held["listen"]), 2, f"cannot listen on {held['listen']}", "--listen")
    check(agent(good, "--metrics", held["metrics"]), 2, f"cannot serve metrics on {held['metrics']}", "--metrics")
