"""When a pod of a Deployment is not moved, and what is said of it."""

import pytest
from tests.kubernetes_moves_rig import OWNER, PACE

from eelgrid_controller.engines.kubernetes.model.objects import Pod
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_MOVE
from eelgrid_controller.engines.kubernetes.pods.migration import (
    MarkPod,
    MoveEnded,
    ScaleDeployment,
    SurgeState,
    WaitStep,
    next_surge_step,
    parse_deployment,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote, format_move_note

NOTE = MoveNote(uid="u0", pod="d-0", deployment="d", owner="rs", since_s=0.0)


def pods(count, *, unready=()):
    return [
        Pod(
            uid=f"u{index}",
            namespace="x",
            name=f"d-{index}",
            labels={},
            annotations={},
            owner=OWNER,
            is_ready=index not in unready,
            node_name="n",
            phase="Running",
            created_s=float(index),
        )
        for index in range(count)
    ]


def deployment(replicas=2, *, status=None, annotations=None, deleted=None, **spec):
    metadata = {"uid": "d", "namespace": "x", "name": "d", "resourceVersion": "5", "generation": 3}
    metadata |= {"annotations": annotations or {}, "deletionTimestamp": deleted}
    told = {"observedGeneration": 3, "replicas": replicas, "updatedReplicas": replicas, **(status or {})}
    return parse_deployment({"metadata": metadata, "spec": {"replicas": replicas, **spec}, "status": told})


def step(found, here, at_s=1.0, **scene):
    return next_surge_step(NOTE, SurgeState(found, here, **scene), PACE, at_s)


def test_first_the_pod_is_marked_then_the_deployment_in_one_patch_with_its_replicas():
    first = step(deployment(), pods(2))
    assert isinstance(first, MarkPod)
    here = pods(2)
    here[0].annotations[ANNOTATION_MOVE] = format_move_note(first.note)
    second = step(deployment(), here)
    assert isinstance(second, ScaleDeployment)
    assert (second.replicas, second.note.replicas, second.note.step) == (3, 2, "surge")
    assert second.deployment.version == "5"


@pytest.mark.parametrize(
    ("found", "scene", "why"),
    [
        (None, {}, "gone"),
        (deployment(deleted="2026-11-22T00:00:00Z"), {}, "gone"),
        (deployment(paused=True), {}, "paused"),
        (deployment(), {"autoscaler": "the HorizontalPodAutoscaler h"}, "the HorizontalPodAutoscaler h scales"),
    ],
)
def test_what_may_not_be_scaled_is_refused_at_once(found, scene, why):
    over = step(found, pods(2), **scene)
    assert isinstance(over, MoveEnded)
    assert not over.is_done
    assert why in over.why


@pytest.mark.parametrize(
    ("found", "here"),
    [
        (deployment(status={"observedGeneration": 2}), pods(2)),
        (deployment(status={"updatedReplicas": 1}), pods(2)),
        (deployment(3), pods(2)),
        (deployment(2), pods(2, unready=(1,))),
        (deployment(annotations={"eelgrid.io/move": '{"uid":"u1","step":"surge","replicas":1}'}), pods(2)),
    ],
)
def test_what_is_not_at_rest_is_waited_for_and_then_refused(found, here):
    assert isinstance(step(found, here, 1.0), WaitStep)
    over = step(found, here, PACE.begin_s + 1.0)
    assert isinstance(over, MoveEnded)
    assert not over.is_done


def test_a_pod_that_has_gone_before_is_not_moved():
    over = step(deployment(), pods(2)[1:])
    assert over == MoveEnded(is_done=False, why="the pod went by itself")
