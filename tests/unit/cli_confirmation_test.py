"""The question before a change that ends work or changes several things: on a terminal, without one, and with --yes."""

from dataclasses import replace

import pytest
from tests.fakes.operators import a_node

from eelgrid_controller.cli import confirmation
from eelgrid_protos.messages import (
    EnergyExporter,
    GpuLayout,
    PartitionedGpu,
    PartitionRecommendation,
    RemoveNodeResponse,
    WantedInstance,
    WorkloadPhase,
)


@pytest.fixture
def asking(monkeypatch):
    monkeypatch.setattr(confirmation, "is_interactive", lambda: True)


@pytest.fixture
def work(eelctl, fake):
    for number in range(7):
        eelctl("submit", "--id", f"w-{number}", "--name", "job", "--cpu", "1")
    eelctl("scale", "w-0", "5")
    fake.nodes.append(replace(a_node("ahead"), ahead_epoch=9, unknown_workload_ids=("lost-1", "lost-2")))
    fake.audited.removals["n1"] = RemoveNodeResponse(ended=("w-1",), shrunk=("chat",))
    fake.spent.exporters["archive"] = EnergyExporter(name="archive", since_ns=0, until_ns=1)
    cut = GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=(WantedInstance(profile="3g.20gb", start=4),))
    gpu = PartitionedGpu(node_name="n", gpu_index=0, model="A100", before=GpuLayout(gpu_uuid="GPU-0"), after=cut)
    fake.partitioned.found = PartitionRecommendation(
        recommendation_id="p", revision=7, gpus=(gpu,), horizon_s=60.0, stages=1, gpus_ready=1
    )


CHANGES = [
    (("cancel", *(f"w-{n}" for n in range(7))), "Cancelling 7 workloads (w-0, w-1, w-2, w-3, w-4 and 2 more)"),
    (
        ("cancel", "--name-contains", "jo", "--namespace", "default"),
        "Cancelling 7 workloads (w-0, w-1, w-2, w-3, w-4 and 2 more)",
    ),
    (("scale", "w-0", "2"), "Scaling w-0 from 5 replicas to 2"),
    (("node", "remove", "n1", "--force"), "Removing n1"),
    (("reconcile", "ahead"), "Reconciling 1 node (ahead)"),
    (("partition", "apply"), "Applying a plan that changes 1 GPU (n:0)"),
    (("partition", "apply", "p"), "Applying p"),
    (("moves", "apply", "m"), "Executing all moves of m"),
    (("exporters", "remove", "archive"), "Removing the exporter archive"),
]
MUTATIONS = {"cancel_workload", "reconcile_node", "apply_moves", "remove_energy_exporter"}


def assert_nothing_changed(fake):
    assert not MUTATIONS.intersection(fake.calls)
    assert fake.partitioned.applied == []
    assert len(fake.workloads["w-0"].placements) == 5
    assert all(one.phase is not WorkloadPhase.CANCELLED for one in fake.workloads.values())


@pytest.mark.parametrize(("words", "what"), CHANGES)
def test_without_a_terminal_yes_is_needed_and_nothing_changes(eelctl, fake, work, words, what):
    refused = eelctl(*words, code=5).stderr
    assert f"{what} needs a confirmation" in refused
    assert refused.endswith("  next: add --yes\n")
    assert_nothing_changed(fake)


@pytest.mark.parametrize(("words", "what"), CHANGES)
@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_a_terminal_asks_and_no_is_the_default(eelctl, fake, work, asking, words, what, answer):
    said = eelctl(*words, input=answer, code=5).stderr
    assert f"{what}? [y/N] " in said
    assert "not confirmed; nothing was changed" in said
    assert_nothing_changed(fake)


@pytest.mark.parametrize("options", [{"input": "y\n"}, {"input": "Yes\n"}, {}])
def test_yes_on_a_terminal_or_as_an_option_goes_on(eelctl, fake, work, asking, options):
    words = ("cancel", "w-1", "w-2") if options else ("cancel", "w-1", "w-2", "--yes")
    assert eelctl(*words, **options).stdout == "w-1: cancelled\nw-2: cancelled\n"


def test_one_of_a_kind_is_not_asked_about(eelctl, fake, work):
    eelctl("cancel", "w-1")
    eelctl("cancel", "w-2", "w-2")
    eelctl("scale", "w-0", "4")
    eelctl("reconcile", "node-0")


def test_what_ends_is_said_before_the_question(eelctl, work, asking):
    said = eelctl("node", "remove", "n1", "--force", input="n\n", code=5).stderr.splitlines()
    assert said[0].strip() == "1 workload would be ended: w-1"
    said = eelctl("reconcile", "ahead", input="n\n", code=5).stderr
    assert "2 workloads released: lost-1, lost-2" in said


def test_filters_cancel_what_matches_and_a_dry_run_lists_it(eelctl, fake, work):
    eelctl("submit", "--id", "other", "--name", "train", "--cpu", "1", "--user", "ann")
    tried = eelctl("cancel", "--user", "ann", "--dry-run")
    assert "dry run: nothing was changed" in tried.stderr
    assert [line.split()[0] for line in tried.stdout.splitlines()] == ["ID", "other"]
    assert_nothing_changed(fake)
    refused = eelctl("cancel", "--user", "ann", code=5).stderr
    assert "Cancelling 1 workload (other) needs a confirmation" in refused, "whoever filters may not know what matches"
    assert eelctl("cancel", "--user", "ann", "--yes").stdout == "other: cancelled\n"
    assert "no workload that waits or runs matches" in eelctl("cancel", "--user", "ann", "--yes", code=4).stderr
    assert "WORKLOAD and --user exclude each other" in eelctl("cancel", "w-1", "--user", "ann", code=2).stderr
    assert eelctl("cancel", code=2).stdout == ""
    assert len(fake.workloads["w-0"].placements) == 5


def test_what_waits_is_cancelled_before_what_runs_so_that_it_does_not_start_in_its_place(eelctl, fake, work):
    fake.workloads["w-0"] = replace(fake.workloads["w-0"], phase=WorkloadPhase.PLACED)
    fake.workloads["w-3"] = replace(fake.workloads["w-3"], phase=WorkloadPhase.PLACED)
    for name in ("w-1", "w-2", "w-4", "w-5", "w-6"):
        fake.workloads[name] = replace(fake.workloads[name], phase=WorkloadPhase.PENDING)
    said = eelctl("cancel", "--name-contains", "jo", "--yes").stdout.splitlines()
    assert [line.partition(":")[0] for line in said] == ["w-1", "w-2", "w-4", "w-5", "w-6", "w-0", "w-3"]
