"""Shrinking decides which nodes a running job keeps, what it is told, and why it may keep all of them: each rule as values."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.element_lists import UnreadableAnswer
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, parse_step_nodes
from eelgrid_controller.engines.slurm.shrinking import (
    KeepNodes,
    Shrinking,
    ShrinkJob,
    ShrinkRefusal,
    classify_refusal,
    find_least_nodes,
    find_profile,
)
from eelgrid_controller.engines.slurm.steering import SteeringSettings, build_request
from eelgrid_protos.messages import WorkloadKind

JOB = SlurmJob(
    job_id="12", state="RUNNING", comment="eelgrid eelgrid-nodes=1", nodes=("n0", "n1", "n2"), node_count=3, cpus=3,
    gpus=(GresCount("a100", 2),), admin_comment="eelgrid:placed:n0,n1,n2", partition="main",
)  # fmt: skip
KEY = "slurm-12"


def decide(shrinking, *places, job=JOB, now_s=100.0):
    return shrinking.decide(KEY, job, places, now_s)


def test_a_job_is_told_first_and_its_nodes_are_taken_when_its_grace_is_over():
    shrinking = Shrinking(30.0)
    assert decide(shrinking, "n0", "n2") == ShrinkJob(JOB, KEY, ("n0", "n2"))
    again = decide(shrinking, "n0", "n2", now_s=129.0)
    assert again == ShrinkJob(JOB, KEY, ("n0", "n2"), is_told=True)
    assert again.leaving == {"n1"}
    assert decide(shrinking, "n0", "n2", now_s=130.0) == ShrinkJob(JOB, KEY, ("n0", "n2"), is_told=True, is_due=True)
    # Slurm has done it.
    assert decide(shrinking, "n0", "n2", job=replace(JOB, nodes=("n0", "n2")), now_s=131.0) is None


def test_a_job_that_is_to_keep_others_than_it_was_told_is_told_again_with_its_whole_grace():
    shrinking = Shrinking(30.0)
    decide(shrinking, "n0", "n2")
    assert decide(shrinking, "n0", now_s=120.0) == ShrinkJob(JOB, KEY, ("n0",))
    assert decide(shrinking, "n0", now_s=149.0) == ShrinkJob(JOB, KEY, ("n0",), is_told=True)


def test_the_node_of_the_batch_script_stays_whichever_the_core_wants():
    assert decide(Shrinking(30.0), "n1", "n2") == ShrinkJob(JOB, KEY, ("n0", "n1"))
    assert decide(Shrinking(30.0), "n2") == ShrinkJob(JOB, KEY, ("n0",))


@pytest.mark.parametrize(
    ("places", "changes"),
    [
        (("n0", "n1", "n2"), {}),
        (("n0", "n3"), {}),
        (("n0", "n1", "n2", "n3"), {}),
        (("n0",), {"state": "COMPLETING"}),
        (("n0",), {"flags": frozenset({"COMPLETING"})}),
        (("n0",), {"state": "SUSPENDED"}),
    ],
    ids=["all", "elsewhere", "more", "ending", "flag", "suspended"],
)
def test_what_is_no_part_of_a_running_job_s_nodes_has_nothing_to_do_with_shrinking(places, changes):
    assert decide(Shrinking(30.0), *places, job=replace(JOB, **changes)) is None


@pytest.mark.parametrize(
    ("comment", "rule"),
    [
        ("eelgrid", ShrinkRefusal.NOT_ELASTIC),
        ("eelgrid eelgrid-nodes=0", ShrinkRefusal.NOT_ELASTIC),
        ("eelgrid eelgrid-nodes=x", ShrinkRefusal.NOT_ELASTIC),
        ("eelgrid eelgrid-nodes=2", ShrinkRefusal.TOO_SMALL),
    ],
)
def test_a_job_keeps_its_nodes_for_a_while_where_its_user_has_not_agreed(comment, rule):
    shrinking, job = Shrinking(30.0), replace(JOB, comment=comment)
    found = decide(shrinking, "n0", job=job)
    assert found == KeepNodes("12", rule)
    assert found.reason
    assert decide(shrinking, "n0", job=job, now_s=699.0) is None
    shrinking.forget_missing({KEY}, 701.0)
    assert decide(shrinking, "n0", job=job, now_s=701.0) == KeepNodes("12", rule)


def test_a_job_that_slurm_refused_to_shrink_keeps_its_nodes_and_what_is_gone_is_forgotten():
    shrinking = Shrinking(30.0)
    decide(shrinking, "n0")
    shrinking.keep(KEY, 110.0)
    assert decide(shrinking, "n0", now_s=120.0) is None
    assert decide(shrinking, "n0", now_s=720.0) == ShrinkJob(JOB, KEY, ("n0",))
    shrinking.forget_missing((), 721.0)
    assert decide(shrinking, "n0", now_s=760.0) == ShrinkJob(JOB, KEY, ("n0",))


def test_slurm_s_refusals_are_named():
    said = {
        "scontrol: Job update not available right now, the DB index is being set, try again in a bit for job 12": "no-database",
        "scontrol: Invalid node name specified for job 12": "nodes",
        "scontrol did not answer in 10 s": "slurm",
    }
    assert {words: classify_refusal(words).value for words in said} == said


def test_words_of_a_comment_count_alone():
    for comment, least, profile in (
        ("eelgrid,eelgrid-nodes=2;eelgrid-profile=bert/large", 2, "bert/large"),
        ("eelgrid eelgrid-nodes=2x eelgrid-profile=", None, ""),
        ("my-eelgrid-nodes=2 not-eelgrid-profile=a", None, ""),
    ):
        job = replace(JOB, comment=comment)
        assert (find_least_nodes(job), find_profile(job)) == (least, profile)


def test_the_core_may_decide_by_itself_of_a_job_with_a_profile_and_gpus():
    def ask(comment, **changes):
        return build_request(replace(JOB, comment=comment, **changes), SteeringSettings()).spec

    found = ask("eelgrid-nodes=1 eelgrid-profile=bert")
    assert (found.kind, found.replicas) == (WorkloadKind.TRAINING_JOB, 3)
    assert (found.training.replicas_least, found.training.replicas_most) == (1, 3)
    assert found.training.slowdown_most == 0.0
    for spec in (ask("eelgrid-nodes=1"), ask("eelgrid-profile=bert"), ask("eelgrid-nodes=4 eelgrid-profile=bert")):
        assert (spec.kind, spec.training) == (WorkloadKind.BATCH_JOB, None)
    assert ask("eelgrid-nodes=1 eelgrid-profile=bert", gpus=()).training is None


def test_steps_are_read_with_their_nodes_and_batch_scripts_are_none():
    lines = ("12.batch", "n0"), ("12.extern", "n[0-2]"), ("12.0", "n1"), ("12.3", "n[1-2]")
    text = "".join(f"{step:64}|{nodes:4000}|\n" for step, nodes in lines)
    assert parse_step_nodes(text) == {"n1", "n2"}
    assert parse_step_nodes("\n") == frozenset()


@pytest.mark.parametrize("text", ["slurm_load error", f"{'12.0':64}|{'n' * 4000}|", f"{'12.0':64}|{'n[1':4000}|"])
def test_steps_that_cannot_be_read_are_refused(text):
    with pytest.raises(UnreadableAnswer):
        parse_step_nodes(text)
