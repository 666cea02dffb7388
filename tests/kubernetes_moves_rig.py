"""A Deployment in a few lines, with a ReplicaSet's controller that takes its time, and somebody who moves one of its pods.

Each thing that may happen is a step of its own: the controller acts, a pod becomes ready, the
mover sees pods (late), takes its next step, and its write is done, refused, or done without
an answer; or its process begins anew and knows only what stands on objects. `check` holds at
every moment. No clock and no sockets.
"""

from dataclasses import replace

from eelgrid_controller.engines.kubernetes.model.objects import OwnerReference, Pod
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_MOVE, DELETION_COST
from eelgrid_controller.engines.kubernetes.pods.migration import (
    LOW_DELETION_COST,
    MarkPod,
    MoveEnded,
    MoveTimeouts,
    ScaleDeployment,
    SurgeState,
    WaitStep,
    next_surge_step,
    parse_deployment,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import format_move_note, parse_move_note

PACE = MoveTimeouts(ready_s=60.0, settle_s=2.0, gone_s=30.0)
OWNER = OwnerReference("apps/v1", "ReplicaSet", "d-1", "rs")


class World:
    """One Deployment, its pods, and what the mover knows."""

    def __init__(self, replicas, *, becomes_ready=True):
        self.now_s = 1000.0
        self.wanted = replicas  # by its people
        self.becomes_ready = becomes_ready
        self.version = self.made = 0
        self.annotations = {}
        self.replicas = self.seen = replicas
        self.pods = {}
        for _ in range(replicas):
            self.make(is_ready=True)
        self.old = next(iter(self.pods))
        self.cache = dict(self.pods)
        self.outcome = self.ending = None
        self.note = None
        self.most = replicas
        self.is_meddled = self.is_restarted = False

    # The cluster

    def make(self, *, is_ready=False):
        self.made += 1
        uid = f"u{self.made}"
        self.pods[uid] = Pod(
            uid=uid,
            namespace="x",
            name=f"d-{uid}",
            labels={},
            annotations={},
            owner=OWNER,
            created_s=float(self.made),
            is_ready=is_ready,
            node_name="n" if is_ready else "",
            phase="Running" if is_ready else "Pending",
        )

    def control(self, rng):
        """The controllers of Deployments and ReplicaSets act once."""
        self.seen = self.replicas
        active = [pod for pod in self.pods.values() if not pod.is_deleting]
        if len(active) < self.replicas:
            self.make()
        elif len(active) > self.replicas:
            rng.shuffle(active)
            active.sort(
                key=lambda pod: (
                    bool(pod.node_name),
                    pod.is_ready,
                    int(pod.annotations.get(DELETION_COST, "0")),
                    -pod.created_s,
                )
            )
            gone = active[0]
            self.pods[gone.uid] = replace(gone, deleted_s=self.now_s)
        self.most = max(self.most, len([pod for pod in self.pods.values() if not pod.is_deleting]))

    def go(self, rng):
        """A pod that is to go has gone, or one that waits becomes ready."""
        uid = rng.choice(sorted(self.pods))
        pod = self.pods[uid]
        if pod.is_deleting:
            del self.pods[uid]
        elif self.becomes_ready:
            self.pods[uid] = replace(pod, is_ready=True, node_name="n", phase="Running")

    def meddle(self, replicas):
        """Its people want another number."""
        self.replicas = self.wanted = replicas
        self.version += 1
        self.is_meddled = True

    # The mover

    def hear(self):
        self.cache = dict(self.pods)

    def deployment(self):
        count = len([pod for pod in self.pods.values() if not pod.is_deleting])
        is_seen = self.seen == self.replicas
        return parse_deployment(
            {
                "metadata": {
                    "uid": "d",
                    "namespace": "x",
                    "name": "d",
                    "resourceVersion": str(self.version),
                    "generation": 2,
                    "annotations": dict(self.annotations),
                },
                "spec": {"replicas": self.replicas},
                "status": {"observedGeneration": 2 if is_seen else 1, "replicas": count, "updatedReplicas": count},
            }
        )

    def order(self, note):
        self.note = note

    def restart(self):
        """Only what stands on objects is known."""
        self.ending = None
        self.is_restarted = True
        self.hear()
        if self.outcome is not None:
            return
        kept = parse_move_note(self.annotations)
        pod = next(
            (parse_move_note(pod.annotations) for pod in self.pods.values() if ANNOTATION_MOVE in pod.annotations), None
        )
        found = kept or pod
        if found is None:
            self.outcome = MoveEnded(is_done=self.old not in self.pods, why="nothing is written anywhere")
        self.note = found

    def step(self, fault=""):
        """The mover's next step; `fault` is busy (not done) or lost (done, no answer)."""
        if self.outcome is not None or self.note is None:
            return
        step = next_surge_step(self.note, SurgeState(self.deployment(), list(self.cache.values())), PACE, self.now_s)
        match step:
            case WaitStep():
                return
            case MoveEnded():
                self.finish(self.ending or step)
                return
            case ScaleDeployment():
                self.ending = step.over
        if fault == "busy":
            return
        self.write(step)
        if isinstance(step, ScaleDeployment) and step.over is not None and fault != "lost":
            self.finish(step.over)

    def write(self, step):
        if isinstance(step, MarkPod):
            pod = self.pods.get(step.pod.uid)
            if pod is None:
                return
            annotations = dict(pod.annotations)
            put(annotations, ANNOTATION_MOVE, step.note and format_move_note(step.note))
            put(annotations, DELETION_COST, step.cost)
            self.pods[pod.uid] = replace(pod, annotations=annotations)
        elif str(self.version) == step.deployment.version:
            self.version += 1
            put(self.annotations, ANNOTATION_MOVE, step.note and format_move_note(step.note))
            if step.replicas is not None:
                self.replicas = step.replicas

    def finish(self, over):
        self.outcome = over
        old = self.pods.get(self.old)
        if old is not None and ANNOTATION_MOVE in old.annotations:
            self.write(MarkPod(old, None, old.annotations.get(DELETION_COST)))

    def check(self):
        """What holds at every moment."""
        ready = [pod for pod in self.pods.values() if pod.is_ready and not pod.is_deleting]
        if not self.is_meddled:
            assert len(ready) >= self.wanted, "fewer pods are ready than before"
            assert self.replicas in (self.wanted, self.wanted + 1)
            assert self.most <= self.wanted + 1, "more than one pod was made before another went"

    def settle(self, rng):
        """No more trouble, for as long as it takes."""
        for _ in range(400):
            self.now_s += 1.0
            self.control(rng)
            self.go(rng)
            self.hear()
            self.step()
            self.check()

    def check_end(self):
        """Nothing is left behind."""
        assert self.outcome is not None, "it never ended"
        assert not self.annotations
        assert all(ANNOTATION_MOVE not in pod.annotations for pod in self.pods.values())
        old = self.pods.get(self.old)
        assert old is None or old.annotations.get(DELETION_COST) != LOW_DELETION_COST
        if not self.is_meddled:
            assert self.replicas == self.wanted
            # A process that begins when all is done finds nothing, and has nothing to say.
            assert self.outcome.is_done == (old is None) or (self.is_restarted and old is None), self.outcome


def put(annotations, key, value):
    if value is None:
        annotations.pop(key, None)
    else:
        annotations[key] = value
