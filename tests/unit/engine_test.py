"""The engines: assignments become load, or an honest answer."""

from eelgrid_agent.node.workload_engine import NoEngine, SimulatedEngine
from eelgrid_protos.messages import ApplyStatus, Assignment, Gpu

GPUS = tuple(Gpu(uuid=f"GPU-{i}", index=i, product="P", model="M", memory_bytes=1000) for i in range(2))


def work(workload_id, *uuids, gpu_milli=1000):
    return Assignment(
        workload_id=workload_id, replica=0, gpu_uuids=uuids, gpu_milli=gpu_milli, cpu_milli=500, memory_bytes=7
    )


def engine():
    calls = []
    return SimulatedEngine(GPUS, lambda *call: calls.append(call)), calls


def test_shares_add_up_to_load():
    one, calls = engine()
    assert one.apply((work("a", "GPU-0", gpu_milli=300), work("b", "GPU-0", gpu_milli=200))) == ()
    assert calls == [("GPU-0", 0.5, 500), ("GPU-1", 0.0, 0)]
    assert one.host_load() == (1000, 14)


def test_the_whole_is_set_each_time_and_freed_gpus_go_idle():
    one, calls = engine()
    one.apply((work("a", "GPU-0"), work("b", "GPU-1")))
    assert calls == [("GPU-0", 1.0, 1000), ("GPU-1", 1.0, 1000)]
    calls.clear()
    one.apply((work("b", "GPU-1"),))
    assert calls == [("GPU-0", 0.0, 0), ("GPU-1", 1.0, 1000)]


def test_a_gpu_that_the_node_lacks_fails_by_name():
    one, calls = engine()
    (failed,) = one.apply((work("a", "GPU-9"),))
    assert (failed.subject, failed.status) == ("a", ApplyStatus.FAILED)
    assert "GPU-9" in failed.detail
    assert {ratio for _, ratio, _ in calls} == {0.0}


def test_no_engine_only_observes():
    results = NoEngine().apply((work("a", "GPU-0"), work("a", "GPU-1"), work("b", "GPU-0")))
    assert [(r.subject, r.status) for r in results] == [("a", ApplyStatus.OBSERVED), ("b", ApplyStatus.OBSERVED)]
    assert NoEngine().host_load() == (0, 0)
