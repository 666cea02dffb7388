"""Fault schedules on the agent's MIG half, some of the benchmark's ten thousand, and that they find what is planted."""

import csv
from dataclasses import replace

import pytest
from bench.fault_world import Tally
from bench.node import CHECKS, Check, main
from bench.node_schedules import check_schedules, run_schedule
from bench.schedule_agent import keeper_over
from bench.schedule_world import World

from eelgrid_agent.enforce.mig.journal import InstanceOrigin
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.enforce.mig.runner import TransitionLimits
from eelgrid_protos.messages import ApplyResult, ApplyStatus

SEEDS = 40


def test_no_schedule_breaks_a_promise():
    tally = check_schedules(seed=0, count=SEEDS)
    assert (tally.cases, tally.failures, tally.first) == (SEEDS, 0, [])


@pytest.mark.slow
def test_no_schedule_of_many_breaks_a_promise():
    tally = check_schedules(seed=20_000, count=3000)
    assert (tally.failures, tally.first) == (0, [])


class Around:
    """A port around the world with a fault in it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __getattr__(self, name):
        return getattr(self.world, name)


class Unseeing(Around):
    def processes(self, uuid):
        return ()


class ForgetsLeases(Around):
    def store(self, records):
        self.world.store([replace(record, leases=frozenset()) for record in records])

    def load(self):
        return [replace(record, leases=frozenset()) for record in self.world.load()]


class TakesAllForItsOwn(Around):
    def load(self):
        return [
            replace(record, known=dict.fromkeys(record.known, InstanceOrigin.ADOPTED)) for record in self.world.load()
        ]


class ForgetsWhatIsUnderWay(Around):
    def load(self):
        return [replace(record, intent=None) for record in self.world.load()]


class CountsFromOneAgain(Around):
    def store(self, records):
        self.world.store([replace(record, generations=dict.fromkeys(record.generations, 1)) for record in records])


class WritesNothing(Around):
    def store(self, records):
        pass


class SaysYes(MigService):
    def apply_layout(self, layout):
        super().apply_layout(layout)
        return ApplyResult(subject=layout.gpu_uuid, status=ApplyStatus.APPLIED)


class NamesNoRule(MigService):
    def apply_layout(self, layout):
        return replace(super().apply_layout(layout), rule="")


def planted(kind=MigService, device=World, journal=World, limits=None):
    def make(world):
        ports = [port if port is World else port(world) for port in (device, journal)]
        seen, disk = (world if port is World else port for port in ports)
        return kind(
            seen,
            world,
            disk,
            boot_id=world.boot_id,
            sleep=world.sleep,
            monotonic_s=lambda: world.now_s,
            wall_ns=lambda: int(world.now_s * 1e9),
            limits=limits,
        )

    return make


def deaf(world):
    """An agent that hears of no reset."""

    class Deaf(MigService):
        def on_device_reset(self, uuid):
            return True

    return planted(kind=Deaf)(world)


def never_boots(world):
    """An agent that takes every boot for the first one."""
    return MigService(
        world,
        world,
        world,
        boot_id=lambda: "boot",
        sleep=world.sleep,
        monotonic_s=lambda: world.now_s,
        wall_ns=lambda: 0,
    )


# With each the seed from which the search begins: one that finds it, so that the search is short.
FAULTS = {
    "processes are not seen": (planted(device=Unseeing), 4),
    "leases are forgotten": (planted(journal=ForgetsLeases), 486),
    "what others made is taken for its own": (planted(journal=TakesAllForItsOwn), 171),
    "what is under way is forgotten": (planted(journal=ForgetsWhatIsUnderWay), 4),
    "generations start again": (planted(journal=CountsFromOneAgain), 3),
    "nothing is written down": (planted(journal=WritesNothing), 0),
    "it repairs for ever": (planted(limits=TransitionLimits(repairs_most=1_000_000)), 33),
    "it goes on for ever": (planted(limits=TransitionLimits(tries_most=1_000_000)), 609),
    "it says yes to everything": (planted(kind=SaysYes), 3),
    "it gives no reason": (planted(kind=NamesNoRule), 3),
    "resets are not heard of": (deaf, 1),
    "boots are not seen": (never_boots, 116),
}


@pytest.mark.parametrize(("make", "begin"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(make, begin):
    """And by the same seed nothing is found in the agent as it is."""
    found = next((seed for seed in range(begin, begin + 1000) if run_schedule(seed, make)), None)
    assert found is not None
    assert run_schedule(found, keeper_over) == ""


def test_the_benchmark_writes_what_each_check_found(tmp_path, capsys):
    assert main(["--seeds", "1", "--out", str(tmp_path), "--first-seed", "7"]) == 0
    with (tmp_path / "summary.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["check", "cases", "failures", "seconds"]
    assert [row[0] for row in rows] == [check.name for check in CHECKS]
    assert all(int(row[1]) >= 1 and row[2] == "0" and float(row[3]) >= 0.0 for row in rows)
    assert "schedules: 1 seeds, 1 cases, 0 failures" in capsys.readouterr().out


def test_the_benchmark_says_which_seed_failed_and_how_to_run_it_again(tmp_path, capsys):
    def odd(seed):
        if seed == 5:
            raise ZeroDivisionError("in the agent")
        tally = Tally()
        tally.count(f"seed {seed}: is odd" if seed % 2 else "")
        return tally

    checks = [Check(name="odd", one=odd), Check(name="fine", one=lambda _: Tally(cases=3), share=0.5, most=1)]
    assert main(["--seeds", "4", "--first-seed", "2", "--out", str(tmp_path)], checks) == 1
    out = capsys.readouterr().out
    assert "odd: 4 seeds, 4 cases, 2 failures" in out
    assert "seed 3: seed 3: is odd" in out
    assert "again: python -m bench.node --only odd --first-seed 5 --seeds 1" in out
    assert "ZeroDivisionError: in the agent" in out
    assert (tmp_path / "summary.csv").read_text().splitlines()[2].startswith("fine,3,0,")
    with pytest.raises(SystemExit):
        main(["--seeds", "0", "--out", str(tmp_path)], checks)
