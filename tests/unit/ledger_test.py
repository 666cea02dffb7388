"""Joules by owner: who is kept, who leaves, who finds no room, and that nothing is lost."""

from tests.builders.agent import build_energy_share, build_slurm_owner

from eelgrid_agent.energy.accounts import (
    ACCOUNTS_MOST,
    CROWDED,
    ENDED_KEPT_S,
    ENDED_MJ_LEAST,
    ENDED_MOST,
    UNALLOCATED,
    UNATTRIBUTED,
    EnergyAccounts,
    EnergyUse,
    UsageOwnerKind,
)
from eelgrid_agent.metrics.snapshot import SHARES_MOST

SECOND = 1_000_000_000


def jobs(ledger):
    return {int(account.owner.job) for account in ledger.rows() if account.owner.kind is UsageOwnerKind.SLURM}


def test_every_account_is_shown():
    assert ACCOUNTS_MOST <= SHARES_MOST


def test_processes_of_one_owner_are_one_account_and_its_parts_are_several():
    ledger = EnergyAccounts()
    whose = build_slurm_owner("1", pid=7)
    ledger.add(
        "GPU-0",
        [
            build_energy_share(whose, 5),
            build_energy_share(build_slurm_owner(1), 6),
            build_energy_share(whose, 7, EnergyUse.CONTEXT_IDLE),
        ],
    )
    ledger.add("GPU-1", [build_energy_share(whose, 8)])
    assert {(account.gpu_uuid, account.part, energy_mj) for account, energy_mj in ledger.rows().items()} == {
        ("GPU-0", EnergyUse.ACTIVE, 11),
        ("GPU-0", EnergyUse.CONTEXT_IDLE, 7),
        ("GPU-1", EnergyUse.ACTIVE, 8),
    }
    assert (ledger.total_mj("GPU-0"), ledger.total_mj("GPU-1")) == (18, 8)


def test_the_worthless_dead_leave_after_one_showing_and_the_others_after_a_while():
    ledger = EnergyAccounts()
    ledger.add(
        "GPU-0",
        [
            build_energy_share(build_slurm_owner(1), ENDED_MJ_LEAST - 1),
            build_energy_share(build_slurm_owner(2), ENDED_MJ_LEAST),
        ],
    )
    ledger.drain_ended((), now_ns=0)
    assert jobs(ledger) == {1, 2}
    ledger.drain_ended((), now_ns=SECOND)
    assert jobs(ledger) == {2}
    ledger.drain_ended((), now_ns=int(ENDED_KEPT_S * SECOND))
    assert jobs(ledger) == {2}
    ledger.drain_ended((), now_ns=int(ENDED_KEPT_S * SECOND) + 1)
    assert jobs(ledger) == set()
    assert ledger.drained_mj == {"GPU-0": 2 * ENDED_MJ_LEAST - 1}
    assert ledger.total_mj("GPU-0") == 2 * ENDED_MJ_LEAST - 1


def test_whoever_comes_back_in_time_has_its_account_still():
    ledger = EnergyAccounts()
    ledger.add("GPU-0", [build_energy_share(build_slurm_owner(1), 5)])
    ledger.drain_ended((), now_ns=0)
    ledger.drain_ended((build_slurm_owner(1),), now_ns=SECOND)
    ledger.drain_ended((), now_ns=2 * SECOND)
    ledger.add("GPU-0", [build_energy_share(build_slurm_owner(1), 5)])
    assert list(ledger.rows().values()) == [10]


def test_five_hundred_of_the_dead_are_kept_the_smallest_leave_first():
    ledger = EnergyAccounts()
    for job in range(ENDED_MOST + 100):
        ledger.add("GPU-0", [build_energy_share(build_slurm_owner(job), ENDED_MJ_LEAST + job)])
    total = ledger.total_mj("GPU-0")
    for turn in range(3):
        ledger.drain_ended((), now_ns=turn * SECOND)
    assert jobs(ledger) == set(range(100, ENDED_MOST + 100))
    assert ledger.total_mj("GPU-0") == total


def test_who_finds_no_room_is_counted_as_other_and_nobody_always_has_room():
    ledger = EnergyAccounts()
    ledger.add("GPU-0", [build_energy_share(build_slurm_owner(job), 1) for job in range(ACCOUNTS_MOST + 50)])
    ledger.add(
        "GPU-0",
        [
            build_energy_share(UNALLOCATED, 3),
            build_energy_share(UNATTRIBUTED, 4),
            build_energy_share(build_slurm_owner(0), 1),
        ],
    )
    assert len(jobs(ledger)) == ACCOUNTS_MOST
    assert ledger.other_mj == {"GPU-0": 50}
    assert ledger.total_mj("GPU-0") == ACCOUNTS_MOST + 50 + 3 + 4 + 1


def test_when_accounts_grow_many_the_dead_make_room():
    ledger = EnergyAccounts()
    ledger.add(
        "GPU-0", [build_energy_share(build_slurm_owner(job), 10 * ENDED_MJ_LEAST + job) for job in range(CROWDED + 10)]
    )
    living = [build_slurm_owner(job) for job in range(10, CROWDED + 10)]
    ledger.drain_ended(living, now_ns=0)
    ledger.drain_ended(living, now_ns=SECOND)
    assert jobs(ledger) == set(range(10, CROWDED + 10))
    assert ledger.total_mj("GPU-0") == sum(10 * ENDED_MJ_LEAST + job for job in range(CROWDED + 10))
