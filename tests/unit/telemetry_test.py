"""Telemetry: what counts as received, lost, repeated, contradictory and fresh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.errors import SequenceJump, UnknownGeneration, WrongWidth
from eelgrid_controller.state.telemetry import PROGRESS_MOST, BatchVerdict, ProgressReports, Telemetry
from eelgrid_protos.messages import (
    Absence,
    AbsenceReason,
    ApplyStatus,
    AttemptState,
    AttemptStatus,
    Column,
    Gpu,
    Inventory,
    JobProgress,
    PlanApplied,
    Reading,
    SampleBatch,
)

SECOND_NS = 1_000_000_000
WALL_NS = 1_700_000_000 * SECOND_NS


def inventory(name: str = "n1", *, gpus: int = 2, generation: int = 1, models: tuple[str, ...] = ("T4",)) -> Inventory:
    return Inventory(
        node_name=name,
        cpu_milli=1000,
        memory_bytes=2**30,
        generation=generation,
        gpus=tuple(
            Gpu(uuid=f"{name}-g{index}", index=index, product="P", model=models[index % len(models)])
            for index in range(gpus)
        ),
    )


def batch(sequence: int, *, ticks: int = 1, gpus: int = 2, watts: float = 50.0, **changes) -> SampleBatch:
    fields = {
        "sequence": sequence,
        "inventory_generation": 1,
        "time_ns": tuple(WALL_NS + index * SECOND_NS for index in range(ticks)),
        "gpu_columns": (Column(reading=Reading.POWER_W, values=tuple([watts] * (ticks * gpus))),),
    }
    return SampleBatch(**(fields | changes))


def feed(*, gpus: int = 2, incarnation: int = 7) -> Telemetry:
    telemetry = Telemetry(send_interval_s=5.0)
    telemetry.open_stream(inventory(gpus=gpus), incarnation)
    return telemetry


def test_batches_are_counted_in_ticks_and_acknowledged_cumulatively() -> None:
    telemetry = feed()
    for sequence in (1, 2, 3):
        receipt = telemetry.receive_batch("n1", batch(sequence, ticks=5), now_s=0.0)
        assert (receipt.verdict, receipt.sequence) == (BatchVerdict.TAKEN, sequence)
    assert telemetry.tick_counts("n1") == (15, 0)
    assert telemetry.open_stream(inventory(), 7) == 3


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_repeated_or_reordered_batch_is_acknowledged_and_ignored(sequence: int) -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1), now_s=0.0)
    telemetry.receive_batch("n1", batch(2, watts=70.0), now_s=1.0)
    receipt = telemetry.receive_batch("n1", batch(sequence, watts=9.0), now_s=2.0)
    assert (receipt.verdict, receipt.sequence) == (BatchVerdict.DUPLICATE, 2)
    assert telemetry.tick_counts("n1") == (2, 0)
    assert telemetry.latest_tick("n1").power_w == 140.0
    assert telemetry.duplicates == 1


def test_a_gap_is_counted_as_its_batches_times_ticks() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1, ticks=5), now_s=0.0)
    telemetry.receive_batch("n1", batch(4, ticks=5), now_s=1.0)
    assert telemetry.tick_counts("n1") == (10, 10)


def test_announced_losses_are_believed_and_not_counted_twice() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1, ticks=5), now_s=0.0)
    telemetry.receive_batch("n1", batch(4, ticks=5, dropped_ticks=7), now_s=1.0)
    assert (telemetry.tick_counts("n1"), telemetry.lost) == ((10, 7), 7)


def test_a_controller_that_restarted_begins_in_the_middle_without_a_gap() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(500), now_s=0.0)
    assert telemetry.tick_counts("n1") == (1, 0)


def test_a_new_incarnation_starts_again_and_keeps_the_account() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(9), now_s=0.0)
    assert telemetry.open_stream(inventory(), 8) == 0
    assert telemetry.receive_batch("n1", batch(1), now_s=1.0).verdict is BatchVerdict.TAKEN
    assert telemetry.tick_counts("n1") == (2, 0)


def test_samples_of_an_inventory_that_never_came_are_refused_once() -> None:
    telemetry = feed()
    with pytest.raises(UnknownGeneration, match="is of generation 1") as caught:
        telemetry.receive_batch("n1", batch(1, inventory_generation=2), now_s=0.0)
    assert caught.value.field == "samples.inventory_generation"
    # The agent sends it again after reconnecting: it must not be stuck on it for ever.
    assert telemetry.receive_batch("n1", batch(1, inventory_generation=2), now_s=0.0).verdict is BatchVerdict.DUPLICATE
    assert telemetry.tick_counts("n1") == (0, 1)


def test_samples_from_before_a_change_are_lost_but_acknowledged() -> None:
    telemetry = feed()
    telemetry.update_inventory(inventory(generation=2, gpus=3))
    receipt = telemetry.receive_batch("n1", batch(1, ticks=5), now_s=0.0)
    assert (receipt.verdict, receipt.sequence) == (BatchVerdict.OUTDATED, 1)
    assert telemetry.tick_counts("n1") == (0, 5)
    assert telemetry.latest_tick("n1") is None


def test_columns_of_another_width_are_refused_by_name() -> None:
    telemetry = feed(gpus=8)
    with pytest.raises(WrongWidth, match=r"2 values a tick.*lists 8 GPUs") as caught:
        telemetry.receive_batch("n1", batch(1, ticks=3, gpus=2), now_s=0.0)
    assert caught.value.field == "samples.gpu_columns"


def test_an_absurd_sequence_cannot_lock_the_feed() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1), now_s=0.0)
    with pytest.raises(SequenceJump):
        telemetry.receive_batch("n1", batch(2**64 - 1), now_s=0.0)
    assert telemetry.receive_batch("n1", batch(2), now_s=0.0).verdict is BatchVerdict.TAKEN


def test_a_changed_inventory_forgets_readings_that_no_longer_fit() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1), now_s=0.0)
    telemetry.update_inventory(inventory())
    assert telemetry.latest_tick("n1") is not None
    telemetry.update_inventory(inventory(generation=2, gpus=1))
    assert telemetry.latest_tick("n1") is None
    assert telemetry.age_s("n1", now_s=0.0, now_ns=WALL_NS) is None


def test_only_the_last_tick_is_kept_and_absent_cells_are_none() -> None:
    telemetry = feed()
    power = Column(
        reading=Reading.POWER_W,
        values=(10.0, 20.0, 30.0, 0.0),
        absences=(Absence(reason=AbsenceReason.TIMED_OUT, cells=(0, 3)),),
    )
    memory = Column(reading=Reading.MEMORY_USED_BYTES, values=(1.0, 2.0, 3.0, 4.0))
    telemetry.receive_batch("n1", batch(1, ticks=2, gpu_columns=(power, memory)), now_s=0.0)
    first = telemetry.gpu("n1", "n1-g0", now_s=0.0, now_ns=WALL_NS + SECOND_NS)
    second = telemetry.gpu("n1", "n1-g1", now_s=0.0, now_ns=WALL_NS + SECOND_NS)
    assert (first.power_w, first.memory_used_bytes, first.temperature_c) == (30.0, 3, None)
    assert (second.power_w, second.memory_used_bytes) == (None, 4)
    sums = telemetry.fresh_power(now_s=0.0, now_ns=WALL_NS)
    assert (sums.power_w, sums.gpus) == (30.0, 1)


def test_power_adds_up_by_model_over_fresh_nodes_only() -> None:
    telemetry = Telemetry(send_interval_s=1.0)
    for name in ("n1", "n2"):
        telemetry.open_stream(inventory(name, gpus=3, models=("T4", "A10")), 1)
    telemetry.receive_batch("n1", batch(1, gpus=3, watts=10.0), now_s=0.0)
    telemetry.receive_batch("n2", batch(1, gpus=3, watts=100.0), now_s=6.0)
    both = telemetry.fresh_power(now_s=7.0, now_ns=WALL_NS)
    assert (both.power_w, both.gpus, dict(both.by_model)) == (330.0, 6, {"T4": 220.0, "A10": 110.0})
    later = telemetry.fresh_power(now_s=8.1, now_ns=WALL_NS)
    assert (later.power_w, later.gpus) == (300.0, 3)


def test_age_is_the_older_of_receipt_and_the_nodes_clock() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1), now_s=100.0)
    assert telemetry.age_s("n1", now_s=103.0, now_ns=WALL_NS) == 3.0
    assert telemetry.age_s("n1", now_s=100.0, now_ns=WALL_NS + 60 * SECOND_NS) == 60.0
    assert telemetry.age_s("n1", now_s=100.0, now_ns=WALL_NS - 60 * SECOND_NS) == 0.0
    assert telemetry.fresh_tick("n1", now_s=120.0, now_ns=WALL_NS) is not None
    assert telemetry.fresh_tick("n1", now_s=120.1, now_ns=WALL_NS) is None
    assert telemetry.gpu("n1", "n1-g0", now_s=120.1, now_ns=WALL_NS).power_w is None


def test_the_freshness_bound_follows_the_cadence() -> None:
    telemetry = feed()
    telemetry.receive_batch("n1", batch(1), now_s=0.0)
    telemetry.set_send_interval(1.0)
    assert telemetry.fresh_tick("n1", now_s=9.0, now_ns=WALL_NS) is None


def seldom(sequence: int, value: float, *, second: int) -> SampleBatch:
    """A batch of expensive readings alone."""
    columns = (Column(reading=Reading.ROW_REMAP_FAILED, values=(value, 0.0)),)
    return batch(sequence, time_ns=(WALL_NS + second * SECOND_NS,), gpu_columns=columns)


def test_a_reading_is_valid_until_its_own_kind_comes_again_or_is_too_old() -> None:
    telemetry = feed()

    def receive(found: SampleBatch, second: int) -> None:
        telemetry.receive_batch("n1", found, now_s=float(second))

    def read(second: float) -> tuple[object, object, float]:
        now = {"now_s": second, "now_ns": WALL_NS + int(second * SECOND_NS)}
        tick = telemetry.fresh_tick("n1", **now)
        assert telemetry.fresh_tick("n1", **now) is tick
        assert telemetry.fresh_power(**now).power_w == (tick.power_w or 0.0)
        return tick.gpus.get(Reading.ROW_REMAP_FAILED), tick.power_w, telemetry.age_s("n1", **now)

    def quick(sequence: int, second: int) -> None:
        receive(batch(sequence, time_ns=(WALL_NS + second * SECOND_NS,)), second)

    quick(1, 0)
    receive(seldom(2, 1.0, second=5), 5)
    assert read(5) == ((1.0, 0.0), 100.0, 0.0), "power of the batch before is still that of now"
    assert read(20) == ((1.0, 0.0), 100.0, 15.0)
    assert read(21) == ((1.0, 0.0), None, 16.0), "older than any power that counts as fresh"
    for number, second in enumerate(range(10, 310, 10), 3):
        quick(number, second)
        assert read(second) == ((1.0, 0.0), 100.0, 0.0)
    receive(seldom(40, 0.0, second=305), 305)
    assert read(305) == ((0.0, 0.0), 100.0, 0.0)
    quick(41, 310)
    assert read(310) == ((0.0, 0.0), 100.0, 0.0)
    quick(42, 1400)
    assert read(1400) == (None, 100.0, 0.0), "nobody has seen the rows for too long"


def test_late_word_of_an_older_plan_is_passed_over() -> None:
    telemetry = feed()
    telemetry.record_plan_applied("n1", PlanApplied(epoch=5, status=ApplyStatus.OBSERVED))
    telemetry.record_plan_applied("n1", PlanApplied(epoch=4, status=ApplyStatus.FAILED))
    assert telemetry.plan_applied("n1").epoch == 5
    assert telemetry.plan_applied("nobody") is None


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), max_size=60))
def test_received_plus_lost_covers_every_sequence_up_to_the_newest(steps: list[tuple[int, int, int]]) -> None:
    """Whatever order, repetition or gap: a tick is received once, and one tick a batch accounts for all."""
    telemetry = feed()
    seen: list[int] = []
    for sequence, _, _ in steps:
        receipt = telemetry.receive_batch("n1", batch(sequence), now_s=0.0)
        assert receipt.sequence == max([*seen, sequence])
        seen.append(sequence)
    received, lost = telemetry.tick_counts("n1")
    assert received + lost == (max(seen) - seen[0] + 1 if seen else 0)
    assert received + telemetry.duplicates == len(steps)


def test_the_newest_progress_of_a_workload_is_kept_and_the_oldest_of_too_many_goes():
    reports = ProgressReports()

    def report(key, step, time_ns):
        progress = JobProgress(step=step, time_ns=time_ns)
        status = AttemptStatus(workload_id=key, replica=0, attempt=1, state=AttemptState.RUNNING, progress=progress)
        reports.record(status)

    report("w", 2, 20)
    # Of another replica, which wrote it before.
    report("w", 1, 10)
    assert reports.get("w").step == 2
    reports.record(AttemptStatus(workload_id="w", replica=0, attempt=1, state=AttemptState.ENDED))
    assert reports.get("w").step == 2
    for number in range(PROGRESS_MOST):
        report(f"v-{number}", 1, 30)
    assert reports.get("w") is None
    assert reports.get("v-0").step == 1
