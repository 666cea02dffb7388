"""What is told of owners: who looks alike is one, the bound holds, and since when what they hold idles."""

from tests.builders.agent import build_slurm_owner

from eelgrid_agent.energy.accounts import (
    EnergyAccount,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.anomalies import AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.metrics.collector import OwnerLabelCache
from eelgrid_agent.metrics.snapshot import SHARES_MOST
from eelgrid_protos.agent_metrics import HOLDER_LABELS, SHARE_LABELS

POD = UsageOwner(kind=UsageOwnerKind.POD, namespace="team", pod="train-0", container="main")


def account(owner, **changes):
    told = {"part": EnergyUse.ACTIVE, "method": ShareMethod.EXCLUSIVE, "confidence": ShareConfidence.HIGH}
    return EnergyAccount(owner=owner, **{"gpu_uuid": "GPU-1"} | told | changes)


def idle(owner, since_s, place=None, kind=EnergyAnomalyKind.HELD_IDLE):
    subject = AnomalySubject(kind=kind, gpu_uuid="GPU-1", owner=owner, gpu_instance_id=place)
    return OngoingAnomaly(subject=subject, since_ns=1, since_wall_ns=since_s * 10**9, wasted_mj=1)


def attribution(accounts=(), anomalies=()):
    return Attribution(shares={}, accounts=dict(accounts), nobody={}, estimates={}, anomalies=tuple(anomalies))


def told(names, values):
    """Values by those labels that say something."""
    return {
        tuple(f"{name}={value}" for name, value in zip(names, key, strict=True) if value): value
        for key, value in values.items()
    }


def test_an_owner_is_told_by_all_that_is_known_of_them():
    owned = attribution([(account(POD, gpu_instance_id=3), 1500)])
    (labels,) = told(SHARE_LABELS, OwnerLabelCache().build_view(owned).energy_j)
    assert labels == (
        "gpu=GPU-1",
        "owner=pod",
        "gpu_instance=3",
        "namespace=team",
        "pod=train-0",
        "container=main",
        "part=active",
        "method=exclusive",
        "confidence=high",
    )


def test_owners_that_look_alike_are_one_and_keep_their_joules():
    one, other = (build_slurm_owner("7", user=user) for user in ("ann", "bob"))
    owned = attribution([(account(one), 2000), (account(other), 3000), (account(POD), 500)])
    assert sorted(OwnerLabelCache().build_view(owned).energy_j.values()) == [0.5, 5.0]


def test_more_owners_than_series_are_counted():
    owners = [build_slurm_owner(number) for number in range(SHARES_MOST + 3)]
    names, accounts = OwnerLabelCache(), [(account(owner), 1000) for owner in owners]
    for _ in range(2):
        view = names.build_view(attribution(accounts))
        assert (len(view.energy_j), view.left_out) == (SHARES_MOST, 3)
    view = names.build_view(attribution(accounts[3:]))
    assert (len(view.energy_j), view.left_out) == (SHARES_MOST, 0)
    assert len(names._kept) == SHARES_MOST, "labels of those who left leave with them"


def test_an_owner_learns_since_when_what_they_hold_idles():
    alike = (build_slurm_owner("7", user="ann"), build_slurm_owner("7", user="bob"))
    owned = attribution(
        anomalies=[
            idle(POD, 100, place=3),
            idle(alike[0], 300),
            idle(alike[1], 200),
            idle(POD, 50, kind=EnergyAnomalyKind.IDLE_CONTEXT),
            idle(POD, 60, kind=EnergyAnomalyKind.STALLED),
        ]
    )
    assert told(HOLDER_LABELS, OwnerLabelCache().build_view(owned).idle_since_s) == {
        ("gpu=GPU-1", "owner=pod", "gpu_instance=3", "namespace=team", "pod=train-0", "container=main"): 100.0,
        ("gpu=GPU-1", "owner=slurm", "slurm_job=7"): 200.0,
    }
    assert OwnerLabelCache().build_view(attribution()).idle_since_s == {}


def test_an_account_in_the_place_of_another_has_its_own_labels():
    """CPython gives the address of an object that went to the next one."""
    names = OwnerLabelCache()
    for number in range(50):
        owner = build_slurm_owner(number)
        (labels,) = told(SHARE_LABELS, names.build_view(attribution([(account(owner), 1)])).energy_j)
        assert f"slurm_job={number}" in labels
