"""Kernels run interpreted until machine code is there: the same decisions, and no call is torn by the change."""

import threading

import numpy as np
import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.runtime.kernel_interpreter import KernelInterpreter
from eelgrid_kernels import compilation
from eelgrid_kernels.compilation import Kernel
from eelgrid_kernels.warmup import list_deciding_kernels
from eelgrid_protos.messages import Locality

NODES = ((2, "G2"), (8, "G3"), (4, "T4"), (8, "G2"))


def decide():
    """Decisions about shares, whole GPUs, gangs and departures, with what is told of each."""
    core = build_core(*(build_node(f"n{i}", gpus=gpus, model=model) for i, (gpus, model) in enumerate(NODES)))
    told = []
    for number in range(40):
        gpus = (1, 1, 2, 0, 4)[number % 5]
        milli = (250, 500)[number % 2] if gpus == 1 else None
        request = build_request(f"w{number}", gpus=gpus, milli=milli, cpu=1 + number % 7, replicas=1 + number % 3)
        told.append(core.submit(request, now_ns=number))
        if number % 4 == 3:
            told.append(core.cancel(f"w{number - 3}", now_ns=number))
    told.append(core.submit(build_request("packed", replicas=3, locality=Locality.PACK), now_ns=99))
    return [(step.events, step.result) for step in told], core.state.dump()


@pytest.fixture
def interpreter():
    found = KernelInterpreter(list_deciding_kernels())
    found.start()
    yield found
    found.stop()


def test_interpreted_decisions_are_those_of_machine_code(interpreter, monkeypatch):
    def refuse(kernel):
        raise AssertionError(f"{kernel.__name__} was compiled")

    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "entry", property(refuse))
        interpreted = decide()
    interpreter.stop()
    assert interpreted == decide()


def make_kernel(function):
    """A kernel whose machine code says so."""
    kernel = Kernel(function, {})
    kernel.__dict__["entry"] = lambda *args: ("machine code", *args)
    return kernel


@pytest.fixture
def pair():
    """A kernel that waits and then calls another, and that other."""
    inner = make_kernel(lambda value: ("interpreted", value))
    reached, go = threading.Event(), threading.Event()

    def call_inner(value):
        reached.set()
        assert go.wait(60.0)
        return inner(value)

    outer = make_kernel(call_inner)
    interpreter = KernelInterpreter([inner, outer])
    interpreter.start()
    yield interpreter, inner, outer, reached, go
    go.set()
    interpreter.stop()
    assert compilation._route is None


def test_a_call_under_way_goes_on_as_it_began_and_later_ones_run_machine_code(pair):
    interpreter, inner, outer, reached, go = pair
    found = []
    thread = threading.Thread(target=lambda: found.append(outer(1)))
    thread.start()
    assert reached.wait(60.0)
    assert inner(2) == ("interpreted", 2)
    interpreter.replace_by_machine_code(lambda: found.append(inner(3)))
    assert found == [("machine code", 3)], "what loads machine code runs it"
    assert inner(4) == ("machine code", 4)
    assert compilation._route is not None
    go.set()
    thread.join()
    assert found[1] == ("interpreted", 1)
    assert compilation._route is None, "calls take their shortest way again"


def test_nothing_is_interpreted_once_loading_has_failed(pair):
    interpreter, inner, *_ = pair

    def load():
        raise MemoryError

    with pytest.raises(MemoryError):
        interpreter.replace_by_machine_code(load)
    assert inner(1) == ("machine code", 1)


def test_a_kernel_that_is_not_among_them_is_compiled(pair):
    assert make_kernel(lambda: "interpreted")() == ("machine code",)


@pytest.mark.parametrize(
    ("value", "told"),
    [(np.int64(3), 3), (np.float64(0.5), 0.5), (np.bool_(True), True), ((np.int64(1), 2.0), (1, 2.0)), (None, None)],
)
def test_results_are_numbers_of_python(value, told):
    kernel = make_kernel(lambda: value)
    interpreter = KernelInterpreter([kernel])
    interpreter.start()
    try:
        found = kernel()
    finally:
        interpreter.stop()
    assert repr(found) == repr(told)
