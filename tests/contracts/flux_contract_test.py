"""What Flux may expect of its scheduler: one suite, on a broker in memory and on a real one, with a real controller.

The real broker runs where `flux` is found (EELGRID_FLUX or the PATH); else those tests are skipped and say so.
"""

import contextlib
import importlib
import json
import re
import sys

import pytest
from tests.e2e.processes import Cluster
from tests.fakes.flux_broker import FluxBroker, install_modules
from tests.flux_rig import CORES, GPUS, RESOURCES, ROOT, FluxRefused, RealBroker, build_jobspec, find_flux
from tests.operations_rig import eelctl_here
from tests.waiting import poll_until

from eelgrid_controller.engines.flux.resource_sets import format_job_id, parse_resource_set
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import (
    AdviseFluxRequest,
    CancelWorkloadRequest,
    GetWorkloadRequest,
    ListFluxSpansRequest,
    WorkloadPhase,
)
from eelgrid_protos.rpc import FLUX_SERVICE, build_client
from eelgrid_protos.transport import open_blocking_channel

MODULE = "eelgrid_controller.engines.flux.sched_eelgrid"
FLUX = find_flux()
BROKERS = [
    "memory",
    pytest.param("real", marks=pytest.mark.skipif(FLUX is None, reason="no flux with flux.scheduler and grpc here")),
]


class MemoryInstance(FluxBroker):
    """The broker in memory with our module."""

    def __init__(self):
        super().__init__(RESOURCES)
        self._names = install_modules(self)
        self._main = importlib.import_module(MODULE).mod_main

    def load(self, *args):
        super().load(self._main, *args)

    def close(self):
        if self._thread is not None and self._thread.is_alive():
            self.unload()
        for name in (*self._names, MODULE, MODULE.replace("sched_eelgrid", "broker_link")):
            sys.modules.pop(name, None)
        assert self.failed is None


class World:
    """An instance, its controller, and how both are asked."""

    def __init__(self, kind, folder):
        self.cluster = Cluster(folder)
        self.controller = self.cluster.controller("--flux")
        self.flux = MemoryInstance() if kind == "memory" else RealBroker(FLUX)
        self.address = self.cluster.address

    def load(self, *args):
        self.flux.load(f"controller={self.address}", *args)
        poll_until(lambda: self.cluster.summary().nodes_ready == 4, "the controller knows the ranks")

    def close(self):
        self.flux.close()
        self.cluster.close()

    def wait(self, number, event, within_s=30.0):
        poll_until(lambda: event in self.flux.list_events(number), f"{event} of {number}", within_s=within_s)

    def start(self, **asked):
        number = self.flux.submit(build_jobspec(**asked))
        self.wait(number, "alloc")
        return number, parse_resource_set(self.flux.get_resources(number))

    def workload(self, number, suffix=""):
        request = GetWorkloadRequest(workload_id=f"flux-{format_job_id(number)}{suffix}")
        with contextlib.suppress(NotFound):
            return self.cluster.operators.get_workload(request, timeout=10.0).workload
        return None

    def phase(self, number, suffix=""):
        found = self.workload(number, suffix)
        return None if found is None else found.phase

    def ask(self, call, request):
        with open_blocking_channel(self.address, tls=None) as channel:
            return getattr(build_client(FLUX_SERVICE, channel), call)(request, timeout=10.0)

    def advise(self, jobspec):
        return self.ask("advise_flux", AdviseFluxRequest(jobspec=json.dumps(jobspec), user="alice"))

    def eelctl(self, *arguments):
        """What eelctl shows, as values of JSON."""
        done = eelctl_here(*arguments, "-o", "json", address=self.address)
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    def is_over(self, number):
        return "clean" in self.flux.list_events(number)


@pytest.fixture(scope="module", params=BROKERS)
def shared(request, tmp_path_factory):
    """An instance and its controller for all tests that end neither."""
    world = World(request.param, tmp_path_factory.mktemp("flux"))
    try:
        world.load()
        yield world
    finally:
        world.close()


@pytest.fixture
def world(shared):
    """The shared instance; every job that a test has submitted is over after it."""
    submitted, before = [], shared.flux.submit

    def submit(*arguments, **named):
        submitted.append(before(*arguments, **named))
        return submitted[-1]

    shared.flux.submit = submit
    yield shared
    shared.flux.submit = before
    for number in submitted:
        if not shared.is_over(number):
            shared.flux.cancel(number)
    poll_until(lambda: all(map(shared.is_over, submitted)), "all jobs are over")
    poll_until(lambda: not shared.cluster.summary().placed, "the core holds nothing")


@pytest.fixture(params=BROKERS)
def lone(request, tmp_path):
    """An instance that a test may take apart."""
    world = World(request.param, tmp_path)
    yield world
    world.close()


def test_a_job_of_nodes_gets_an_exact_r_on_other_nodes_with_its_gpus(world):
    number, found = world.start(nodes=2, slots=2, cores=2, gpus=1, constraints={"properties": ["ssd"]})
    assert sorted(one.hostname for one in found.ranks.values()) == ["n0", "n1"]
    assert {(len(one.cores), len(one.gpus)) for one in found.ranks.values()} == {(4, 2)}
    assert (found.nslots, found.expiration - found.starttime) == (4, 600.0)
    assert found.properties["ssd"] == frozenset({0, 1})
    placed = world.workload(number)
    assert {(one.node_name, one.gpu_indexes) for one in placed.placements} == {
        (one.hostname, tuple(sorted(one.gpus))) for one in found.ranks.values()
    }


def test_slots_may_share_a_node_and_constraints_are_any_tree(world):
    tree = {"and": [{"not": [{"properties": ["ssd"]}]}, {"or": [{"ranks": ["3"]}, {"ranks": ["0"]}]}]}
    _, found = world.start(slots=3, cores=2, gpus=1, constraints=tree)
    assert {rank: (len(one.cores), len(one.gpus)) for rank, one in found.ranks.items()} == {3: (6, 3)}


def test_an_exclusive_job_gets_whole_nodes_that_nobody_uses(world):
    _, other = world.start(nodes=1, cores=1)
    _, found = world.start(nodes=3, cores=1, exclusive=True)
    assert {(len(one.cores), len(one.gpus)) for one in found.ranks.values()} == {(CORES, GPUS)}
    assert not found.overlaps(other)


def test_no_core_and_no_gpu_is_given_twice_and_the_next_job_starts_when_one_is_free(world):
    started = [world.start(slots=4, cores=2, gpus=1) for _ in range(4)]
    others, first = [number for number, _ in started], [found for _, found in started]
    assert all(not one.overlaps(two) for at, one in enumerate(first) for two in first[:at])
    # It fits wherever one of them was: which ranks a job shares depends on what ran there before.
    number = world.flux.submit(build_jobspec(slots=4, cores=2, gpus=1))
    poll_until(lambda: world.phase(number) is WorkloadPhase.PENDING, "it waits in the core")
    poll_until(lambda: world.flux.get_annotations(number).get("reason_pending"), "Flux is told why")
    assert "alloc" not in world.flux.list_events(number)
    world.flux.cancel(others[0])
    world.wait(number, "alloc")


def test_a_job_that_could_never_run_is_denied_with_the_reason_and_checked_before(world):
    asked = build_jobspec(nodes=5)
    assert "4 fit" in world.flux.find_infeasibility(asked)
    assert world.flux.find_infeasibility(build_jobspec(nodes=4, cores=CORES, gpus=GPUS)) == ""
    number = world.flux.submit(asked)
    world.wait(number, "clean")
    assert "needs 5 nodes" in world.flux.get_exception(number)


def test_a_waiting_job_is_cancelled_here_and_in_the_core(world):
    world.start(nodes=4, cores=CORES)
    number = world.flux.submit(build_jobspec(nodes=1))
    poll_until(lambda: world.flux.get_annotations(number), "it waits in the core")
    world.flux.cancel(number)
    world.wait(number, "clean")
    poll_until(lambda: world.phase(number) is WorkloadPhase.CANCELLED, "the core forgets it")


def test_a_higher_priority_goes_first_also_if_it_is_given_later(world):
    holding, _ = world.start(nodes=4, cores=CORES)
    early, late = (world.flux.submit(build_jobspec(nodes=4, cores=CORES)) for _ in range(2))
    poll_until(lambda: world.flux.get_annotations(early) and world.flux.get_annotations(late), "both wait")
    world.flux.set_priority(late, 31)
    # Flux says so by a message, or takes requests back and asks anew: the number of its workload is one of the next.
    suffixes = (".1", ".2", ".3", ".4")
    poll_until(lambda: any(world.phase(late, one) is WorkloadPhase.PENDING for one in suffixes), "the core knows")
    world.flux.cancel(holding)
    world.wait(late, "alloc")
    assert "alloc" not in world.flux.list_events(early)


def test_nothing_starts_on_a_drained_rank_and_all_may_again_after(world):
    world.flux.drain("0-2")
    try:
        poll_until(lambda: not world.advise(build_jobspec(nodes=2)).constraint, "the core knows")
        _, found = world.start(slots=1)
        assert found.ranks.keys() == {3}
        waiting = world.flux.submit(build_jobspec(nodes=2))
        poll_until(lambda: world.flux.get_annotations(waiting), "it waits")
    finally:
        world.flux.drain("0-2", is_down=False)
    world.wait(waiting, "alloc")


def test_what_an_operator_cancels_here_ends_in_flux(world):
    running, _ = world.start(nodes=4, cores=CORES)
    waiting = world.flux.submit(build_jobspec(nodes=1))
    poll_until(lambda: world.flux.get_annotations(waiting), "it waits")
    for number in (waiting, running):
        request = CancelWorkloadRequest(workload_id=f"flux-{format_job_id(number)}")
        world.cluster.operators.cancel_workload(request, timeout=10.0)
        world.wait(number, "clean")
    assert "operator" in world.flux.get_exception(waiting)
    assert "Eelgrid" in world.flux.get_exception(running)


def test_the_journal_says_who_held_which_gpus_from_when_to_when(world):
    number, found = world.start(nodes=2, cores=1, gpus=3)
    world.flux.cancel(number)
    world.wait(number, "clean")

    def spans():
        answer = world.ask("list_flux_spans", ListFluxSpansRequest())
        return [one for one in answer.spans if one.job == format_job_id(number) and one.end_ns]

    poll_until(lambda: len(spans()) == 2, "both spans have ended")
    assert {(one.hostname, one.gpus) for one in spans()} == {
        (one.hostname, tuple(sorted(one.gpus))) for one in found.ranks.values()
    }
    assert all(0 < one.end_ns - one.begin_ns < 60e9 and one.user and one.wait_s >= 0 for one in spans())
    shown = world.eelctl("flux", "spans", "--job", format_job_id(number))
    assert {(one["hostname"], tuple(one["gpus"])) for one in shown} == {(one.hostname, one.gpus) for one in spans()}
    assert {one["energy_j"] for one in shown} == {None}


def test_advice_is_a_constraint_on_the_ranks_where_the_core_would_go(world):
    asked = build_jobspec(nodes=1, gpus=1, constraints={"properties": ["h100@gpu"]})
    answer = world.advise(asked)
    assert json.loads(answer.constraint) in ({"ranks": ["2"]}, {"ranks": ["3"]})
    world.start(nodes=4, cores=CORES)
    answer = world.advise(asked)
    assert answer.constraint == ""
    assert answer.reason


def test_a_module_of_another_flux_or_with_wrong_arguments_is_refused_with_the_remedy(lone):
    wrong = "insecure", "patience=soon"
    with pytest.raises((ValueError, FluxRefused), match="patience=soon: give seconds"):
        lone.flux.load(f"controller={lone.address}", *wrong)
    if isinstance(lone.flux, MemoryInstance):
        for version, message in (("0.83.0", "flux-core is 0.83.0"), ("1.0.0", "another Eelgrid")):
            lone.flux.version = version
            with pytest.raises(ValueError, match=message):
                lone.flux.load(f"controller={lone.address}")
    lone.flux.failed = None


def test_a_module_that_is_loaded_again_goes_on_with_what_runs_and_waits(lone):
    lone.load()
    number, found = lone.start(nodes=4, cores=CORES - 1, gpus=2)
    waiting = lone.flux.submit(build_jobspec(nodes=4, cores=2))
    poll_until(lambda: lone.flux.get_annotations(waiting), "it waits")
    lone.flux.unload()
    lone.load()
    small, more = lone.start(slots=4, cores=1, gpus=2)
    assert not more.overlaps(found)
    assert lone.phase(number) is WorkloadPhase.PLACED
    for one in (number, small):
        lone.flux.cancel(one)
    lone.wait(waiting, "alloc")


def test_a_controller_that_has_lost_everything_adopts_what_runs(lone):
    lone.load()
    number, found = lone.start(nodes=2, slots=2, cores=2, gpus=1)
    lone.controller.kill()
    lone.cluster.data.rename(lone.cluster.data.with_name("lost"))
    lone.controller = lone.cluster.controller("--flux")
    poll_until(lambda: lone.cluster.until(lone.cluster.summary).placed == 1, "it is adopted")
    adopted = lone.workload(number)
    assert {(one.node_name, one.gpu_indexes) for one in adopted.placements} == {
        (one.hostname, tuple(sorted(one.gpus))) for one in found.ranks.values()
    }
    _, more = lone.start(slots=8, cores=1, gpus=1)
    assert not more.overlaps(found)


def test_flux_goes_on_alone_while_the_controller_is_away_and_is_adopted_after(lone):
    lone.load("patience=1")
    lone.controller.kill()
    number, found = lone.start(nodes=2, cores=2, gpus=1)
    lone.controller = lone.cluster.controller("--flux")
    poll_until(lambda: lone.cluster.until(lone.cluster.summary).placed == 1, "it is adopted")
    assert {one.node_name for one in lone.workload(number).placements} == {one.hostname for one in found.ranks.values()}
    _, more = lone.start(nodes=4, cores=2, gpus=1)
    assert not more.overlaps(found)


@pytest.mark.skipif(FLUX is None, reason="no flux with flux.scheduler and grpc here")
def test_an_instance_starts_with_our_scheduler_by_the_file_for_a_site(tmp_path):
    """As a system instance does, with the file of deploy/flux; for the place of the module and the controller's address."""
    cluster = Cluster(tmp_path)
    cluster.controller("--flux")
    text = (ROOT / "deploy" / "flux" / "sched-eelgrid.toml").read_text()
    text = re.sub(r'(?m)^module = ".*/eelgrid_controller', f'module = "{ROOT}/controller/eelgrid_controller', text)
    (tmp_path / "modprobe.d").mkdir()
    (tmp_path / "modprobe.d" / "sched-eelgrid.toml").write_text(text.replace("127.0.0.1:7443", cluster.address))
    broker = RealBroker(FLUX, {"FLUX_MODPROBE_PATH_APPEND": str(tmp_path)})
    try:
        modules = broker.run("module", "list")
        assert "sched_eelgrid" in modules
        assert "sched-simple" not in modules
        number = broker.submit(build_jobspec(nodes=2, gpus=1))
        poll_until(lambda: "alloc" in broker.list_events(number), "it is placed")
        poll_until(lambda: cluster.summary().placed == 1, "by the controller")
        broker.cancel(number)
    finally:
        broker.close()
        cluster.close()


@pytest.mark.skipif(FLUX is None, reason="no flux with flux.scheduler and grpc here")
def test_under_another_scheduler_jobs_are_known_and_advised(tmp_path):
    world = World("real", tmp_path)
    try:
        world.flux.configure(f"""[eelgrid]
controller = "{world.address}"
[ingest.frobnicator]
plugins = ["defaults", "constraints", "{world.flux.plugin}"]
""")
        world.flux.run("module", "load", str(world.flux.observer), f"controller={world.address}")
        poll_until(lambda: world.cluster.summary().nodes_ready == 4, "the controller knows the ranks")
        number, found = world.start(nodes=1, slots=1, gpus=3, constraints={"properties": ["h100@gpu"]})
        advised = world.flux.get_jobspec(number)["attributes"]["system"]["constraints"]
        (host,) = [one.hostname for one in found.ranks.values()]
        assert advised == {"and": [{"properties": ["h100@gpu"]}, {"ranks": [str(*found.ranks)]}]}
        poll_until(lambda: world.phase(number) is WorkloadPhase.PLACED, "it is adopted")
        (place,) = world.workload(number).placements
        assert (place.node_name, place.gpu_indexes) == (host, tuple(sorted(found.ranks[min(found.ranks)].gpus)))
        world.flux.cancel(number)
        poll_until(lambda: world.phase(number) is WorkloadPhase.CANCELLED, "it is over")
    finally:
        world.close()
