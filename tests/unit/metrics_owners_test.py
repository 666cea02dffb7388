"""What is told of owners: who looks alike is one, the bound holds, and since when what they hold idles."""

from eelgrid_agent.attribution.anomalies import Anomaly, AnomalyKind, Subject
from eelgrid_agent.attribution.attributor import Attribution
from eelgrid_agent.attribution.ledger import Account
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_agent.attribution.shares import Confidence, Method, Part
from eelgrid_agent.metrics.frame import HOLDER_LABELS, SHARE_LABELS, SHARES_MOST
from eelgrid_agent.metrics.owners import OwnerNames

POD = Owner(kind=OwnerKind.POD, namespace="team", pod="train-0", container="main")


def account(owner, **changes):
    told = {"part": Part.ACTIVE, "method": Method.EXCLUSIVE, "confidence": Confidence.HIGH}
    return Account(owner=owner, **{"gpu_uuid": "GPU-1"} | told | changes)


def idle(owner, since_s, place=None, kind=AnomalyKind.HELD_IDLE):
    subject = Subject(kind=kind, gpu_uuid="GPU-1", owner=owner, gpu_instance_id=place)
    return Anomaly(subject=subject, since_ns=1, since_wall_ns=since_s * 10**9, wasted_mj=1)


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
    (labels,) = told(SHARE_LABELS, OwnerNames().view(owned).energy_j)
    assert labels == (
        "gpu=GPU-1", "owner=pod", "gpu_instance=3", "namespace=team", "pod=train-0", "container=main", "part=active",
        "method=exclusive", "confidence=high",
    )  # fmt: skip


def test_owners_that_look_alike_are_one_and_keep_their_joules():
    one, other = (Owner(kind=OwnerKind.SLURM, job="7", user=user) for user in ("ann", "bob"))
    owned = attribution([(account(one), 2000), (account(other), 3000), (account(POD), 500)])
    assert sorted(OwnerNames().view(owned).energy_j.values()) == [0.5, 5.0]


def test_more_owners_than_series_are_counted():
    owners = [Owner(kind=OwnerKind.SLURM, job=str(number)) for number in range(SHARES_MOST + 3)]
    names, accounts = OwnerNames(), [(account(owner), 1000) for owner in owners]
    for _ in range(2):
        view = names.view(attribution(accounts))
        assert (len(view.energy_j), view.left_out) == (SHARES_MOST, 3)
    view = names.view(attribution(accounts[3:]))
    assert (len(view.energy_j), view.left_out) == (SHARES_MOST, 0)
    assert len(names._kept) == SHARES_MOST, "labels of those who left leave with them"


def test_an_owner_is_told_since_when_what_they_hold_idles():
    alike = Owner(kind=OwnerKind.SLURM, job="7", user="ann"), Owner(kind=OwnerKind.SLURM, job="7", user="bob")
    owned = attribution(
        anomalies=[
            idle(POD, 100, place=3), idle(alike[0], 300), idle(alike[1], 200),
            idle(POD, 50, kind=AnomalyKind.IDLE_CONTEXT), idle(POD, 60, kind=AnomalyKind.STALLED),
        ]
    )  # fmt: skip
    assert told(HOLDER_LABELS, OwnerNames().view(owned).idle_since_s) == {
        ("gpu=GPU-1", "owner=pod", "gpu_instance=3", "namespace=team", "pod=train-0", "container=main"): 100.0,
        ("gpu=GPU-1", "owner=slurm", "slurm_job=7"): 200.0,
    }
    assert OwnerNames().view(attribution()).idle_since_s == {}


def test_an_account_in_the_place_of_another_has_its_own_labels():
    """CPython gives the address of an object that went to the next one."""
    names = OwnerNames()
    for number in range(50):
        owner = Owner(kind=OwnerKind.SLURM, job=str(number))
        (labels,) = told(SHARE_LABELS, names.view(attribution([(account(owner), 1)])).energy_j)
        assert f"slurm_job={number}" in labels
