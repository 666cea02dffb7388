"""eelctl queue show, apply and move: the tree, the file, what differs, and quotas below what runs."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_request
from tests.tables import strip_table

from eelgrid_controller.cli.queue_file import read_queue_file
from eelgrid_protos.messages import (
    EnforcementMode,
    ListSpendingResponse,
    PreemptionReclaim,
    PreemptionVictims,
    PreemptionWithin,
    PriorityClass,
    Queue,
    QueuePreemption,
    QueueQuota,
    QueueStatus,
    QueueUsage,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    SpendingStatus,
    Workload,
    WorkloadPhase,
)

FILE = """
half_life: 2d
queues:
  - name: research
    quota: {gpu: 8, memory: 2TiB}
  - name: vision
    parent: research
    weight: 2
    quota:
      gpu: {nominal: 4, borrow: 2, lend: 1, max: 6.5}
      gpu/H100: 2
      cpu: 500m
      power: 5.6kW
    users: [ann]
"""
RESEARCH = Queue(
    name="research",
    quotas=(QueueQuota(resource="gpu", nominal=8000), QueueQuota(resource="memory", nominal=2 * 2**40)),
)
VISION = Queue(
    name="vision",
    parent="research",
    weight=2.0,
    quotas=(
        QueueQuota(resource="gpu", nominal=4000, borrowing_limit=2000, lending_limit=1000, usage_limit=6500),
        QueueQuota(resource="gpu/H100", nominal=2000),
        QueueQuota(resource="cpu", nominal=500),
        QueueQuota(resource="power", nominal=5_600_000),
    ),
    users=("ann",),
)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "queues.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def running(fake):
    fake.queued.statuses[:] = [
        QueueStatus(
            queue=RESEARCH,
            usage=(
                QueueUsage(resource="gpu", quota=12_000, used=7500, usage_most=12_000),
                QueueUsage(resource="cpu", quota=0, used=0),
            ),
            running=3,
            waiting=2,
        ),
        QueueStatus(
            queue=VISION,
            usage=(
                QueueUsage(resource="gpu", quota=4000, used=5500, borrowed=1500, usage_most=6000),
                QueueUsage(resource="cpu", quota=500, used=16_000),
            ),
            weighted_share=0.0625,
            running=3,
            waiting=2,
        ),
    ]
    return fake


def test_the_file_declares_amounts_as_people_write_them(written):
    found = read_queue_file(written(FILE))
    assert found == {"queues": (RESEARCH, VISION), "queue_half_life_s": 172_800.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "is not a mapping"),
        ("queues: 3", "has no list `queues`"),
        ("queue: []", "has no field 'queue'"),
        ("queues: [{name: a, quotas: {}}]", "queues[0]: has no field 'quotas'"),
        ("queues: [{name: a, quota: {gpu: many}}]", "queues[0].quota.gpu.nominal: 'many' is not"),
        ("queues: [{name: a, quota: {gpu: 0.0001}}]", "'0.0001' is not a number of thousandths"),
        ("queues: [{name: a, quota: {memory: 8}}]", "'8' is less than 1 MiB without a unit"),
        ("queues: [{name: a, quota: {power: 20}}]", "queues[0].quota.power.nominal: '20'"),
        ("queues: [{name: a, quota: {gpu: {most: 3}}}]", "quota.gpu: has no field 'most'"),
        ("queues: [{name: a, quota: {disk: 3}}]", "queues[0].quotas[0].resource"),
        ("queues: [{name: a, weight: 0}]", "queues[0].weight"),
        ("half_life: soon\nqueues: []", "half_life: 'soon' is no duration"),
        ("queues: [{name: a, preemption: {reclaim: all}}]", "queues[0].preemption.reclaim: is 'all'"),
        ("queues: [{name: a, preemption: {within: [never]}}]", "queues[0].preemption.within: is ['never']"),
        ("queues: [{name: a, preemption: {min_runtime: soon}}]", "preemption.min_runtime: 'soon' is no duration"),
        ("queues: [{name: a, preemption: yes}]", "queues[0].preemption: is not a mapping"),
        ("queues: []\npriority_classes: [{name: a, value: 3}]", "priority_classes[0]: has no field 'value'"),
        ("queues: []\npriority_classes: [{name: a, preempts: no}]", "priority_classes[0].preempts: is False"),
        ("queues: []\npriority_classes: {a: 3}", "priority_classes: is not a list"),
        ("queues: []\npriority_classes: [{name: a, priority: 1e9}]", "priority_classes[0].priority"),
        ("queues: [", "line 2, column 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(eelctl, written, fake, text, problem):
    answer = eelctl.run("queue", "apply", "-f", str(written(text)))
    assert answer.exit_code != 0
    assert problem in answer.stderr
    assert "update_policy" not in fake.calls


def test_apply_prints_what_differs_and_puts_it_in_force(eelctl, written, fake):
    path = str(written(FILE))
    dry = eelctl("queue", "apply", "-f", path, "--dry-run").stdout
    assert dry.splitlines() == [
        "dry run: nothing was changed",
        "queues half-life: 7 d -> 2 d",
        "queue research: new, parent none, weight 1, gpu 8, memory 2 TiB",
        "queue vision: new, parent research, weight 2, gpu 4 borrow 2 lend 1 max 6.5, gpu/H100 2, cpu 0.5, power 5,600 W, users ann",
    ]
    assert not fake.policy.queues
    eelctl("queue", "apply", "-f", path)
    assert fake.policy.queues == (RESEARCH, VISION)
    again = written(FILE.replace("borrow: 2", "borrow: 3").replace("    weight: 2\n", ""))
    assert eelctl("queue", "apply", "-f", str(again)).stdout.splitlines() == [
        "queue vision: weight 2 -> 1",
        "queue vision: gpu 4 borrow 2 lend 1 max 6.5 -> 4 borrow 3 lend 1 max 6.5",
    ]
    assert eelctl("queue", "apply", "-f", str(again)).stdout == "no queue changes\n"
    assert eelctl("queue", "apply", "-f", str(written("queues: []"))).stdout.splitlines() == [
        "queue research: removed",
        "queue vision: removed",
    ]
    assert fake.policy.queues == ()


def test_preemption_and_priority_classes_are_declared_and_every_change_is_a_line(eelctl, written, fake):
    text = (
        "queues: [{name: a, preemption: {within: lower_priority, reclaim: fair_share, victims: all, min_runtime: 10m}}]\n"
        "priority_classes: [{name: urgent, priority: 100}, {name: patient, preempts: never}]\n"
    )
    eelctl("queue", "apply", "-f", str(written(text)))
    assert fake.policy.queues[0].preemption == QueuePreemption(
        within=PreemptionWithin.LOWER_PRIORITY,
        reclaim=PreemptionReclaim.FAIR_SHARE,
        victims=PreemptionVictims.ALL,
        min_runtime_s=600.0,
    )
    assert fake.policy.priority_classes == (
        PriorityClass(name="urgent", priority=100),
        PriorityClass(name="patient", never_preempts=True),
    )
    again = text.replace("fair_share", "never").replace("100", "90").replace(", {name: patient, preempts: never}", "")
    assert eelctl("queue", "apply", "-f", str(written(again))).stdout.splitlines() == [
        "priority class urgent: 100 -> 90",
        "priority class patient: 0, preempts never -> none",
        "queue a: preemption reclaim fair_share -> never",
    ]


def test_a_quota_below_what_runs_needs_yes(eelctl, written, running):
    path = str(
        written("queues: [{name: research, quota: {gpu: 4}}, {name: vision, parent: research, quota: {gpu: 3}}]")
    )
    answer = eelctl.run("queue", "apply", "-f", path)
    assert answer.exit_code != 0
    assert "warning: queue vision: a quota of 3 gpu is below the 5.5 that run there" in answer.stderr
    assert "warning: queue research: a quota of 7 gpu is below the 7.5 that run there" in answer.stderr
    assert "add --yes" in answer.stderr
    assert not running.policy.queues
    eelctl("queue", "apply", "-f", path, "--yes")
    assert len(running.policy.queues) == 2


def test_show_prints_the_tree(eelctl, running):
    assert eelctl("queue", "show").stdout == strip_table("""
QUEUE     RESOURCE  NOMINAL  USED  BORROWED  LENT  MOST  WEIGHT  SHARE  RUNNING  WAITING
research  gpu            12   7.5         0     0    12       1  0.000        3        2
  vision  gpu             4   5.5       1.5     0     6       2  0.062        3        2
  vision  cpu           0.5    16         0     0     -       2  0.062        3        2
""")
    plain = json.loads(eelctl("queue", "show", "-o", "json").stdout)
    assert [row["queue"]["name"] for row in plain["queues"]] == ["research", "vision"]
    running.queued.statuses.clear()
    assert eelctl("queue", "show").stdout == "no queues are declared; declare them with eelctl queue apply -f FILE\n"


def test_move_says_where_it_is_now(eelctl, fake):
    spec = build_request(name="w").spec
    fake.workloads["w-1"] = Workload(workload_id="w-1", spec=spec, phase=WorkloadPhase.PENDING, submitted_ns=1)
    assert eelctl("queue", "move", "w", "vision").stdout == (
        "w-1: moved to queue vision; waits there: quota: too little\n"
    )


SPENDING_FILE = """
queues:
  - name: research
    quota: {gpu: 8}
  - name: vision
    parent: research
    spending: [kwh=100 per day, "gpu-hours=2000 per month, observe"]
"""
KWH = SpendingLimit(
    scope=SpendingScope.QUEUE,
    name="vision",
    quantity=SpendingQuantity.ENERGY,
    most=100 * 3.6e6,
    period=SpendingPeriod.DAY,
    mode=EnforcementMode.ENFORCE,
)


def test_the_file_declares_spending_limits_of_a_queue_and_keeps_all_others(eelctl, written, fake):
    other = replace(KWH, scope=SpendingScope.USER, name="ann")
    fake.policy = replace(fake.policy, spending=(other,))
    path = str(written(SPENDING_FILE))
    assert eelctl("queue", "apply", "-f", path).stdout.splitlines()[1] == (
        "queue vision: new, parent research, weight 1, spending per day, energy queue=vision kwh=100 per day, "
        "spending per month, gpu_time queue=vision gpu-hours=2000 per month, observe"
    )
    hours = replace(
        KWH,
        quantity=SpendingQuantity.GPU_TIME,
        most=2000 * 3600.0,
        period=SpendingPeriod.MONTH,
        mode=EnforcementMode.OBSERVE,
    )
    assert fake.policy.spending == (other, KWH, hours)
    assert eelctl("queue", "apply", "-f", path).stdout == "no queue changes\n"
    # A queue that says nothing about spending keeps what it has; an empty list removes it.
    silent = SPENDING_FILE[: SPENDING_FILE.index("    spending")]
    eelctl("queue", "apply", "-f", str(written(silent)))
    assert fake.policy.spending == (other, KWH, hours)
    assert eelctl("queue", "apply", "-f", str(written(silent + "    spending: []\n"))).stdout.splitlines() == [
        "queue vision: spending per day, energy queue=vision kwh=100 per day -> not set",
        "queue vision: spending per month, gpu_time queue=vision gpu-hours=2000 per month, observe -> not set",
    ]
    assert fake.policy.spending == (other,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("spending: 3", "queues[0].spending: is no list"),
        ("spending: [joules]", "queues[0].spending: 'queue=a joules'; write"),
        ("spending: [kwh=0 per day]", "queues[0].spending: '0'; write a number above 0"),
        ("spending: [kwh=none per day]", "removes or repeats a limit"),
        ("spending: [kwh=1 per day, kwh=2 per day]", "removes or repeats a limit"),
        ("spending: [kwh=1 per day]}, {name: b, parent: a", "queue a has queues below it and holds no work"),
    ],
)
def test_a_wrong_spending_limit_is_refused_with_its_place(eelctl, written, fake, row, problem):
    answer = eelctl.run("queue", "apply", "-f", str(written(f"queues: [{{name: a, {row}}}]")))
    assert answer.exit_code == 5
    assert problem in answer.stderr
    assert "update_policy" not in fake.calls


def test_show_says_what_queues_have_spent_of_their_limits(eelctl, running):
    running.limited.answer = ListSpendingResponse(
        limits=(
            SpendingStatus(limit=KWH, begin_ns=0, end_ns=1, spent=25 * 3.6e6, waiting=2),
            SpendingStatus(limit=replace(KWH, quantity=SpendingQuantity.MONEY, most=50.0), begin_ns=0, end_ns=1),
            SpendingStatus(limit=replace(KWH, scope=SpendingScope.USER, name="ann"), begin_ns=0, end_ns=1),
        ),
        currency="EUR",
    )
    assert eelctl("queue", "show").stdout.splitlines()[-3:] == [
        "",
        "queue vision has spent 25 of 100 kWh of the day; 2 workloads wait for it",
        "queue vision has spent an unknown part of 50 EUR of the day",
    ]
    plain = json.loads(eelctl("queue", "show", "-o", "json").stdout)
    assert [row["limit"]["quantity"] for row in plain["spending"]] == ["energy", "money"]
