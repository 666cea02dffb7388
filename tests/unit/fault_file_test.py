"""Faults by file: each line once, when it is whole, and what is said of a line that is none."""

import json

import pytest

from eelgrid_agent.simulation.fault_file import FaultFile, FaultFileError
from eelgrid_agent.simulation.gpu import SimGpu, SimHealth
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec
from eelgrid_protos.messages import Reading

SECOND = 1_000_000_000


class Scene:
    """One node, its clock and its fault file."""

    def __init__(self, folder, *products):
        self.now_ns = 0
        spec = NodeSpec(
            node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=tuple(GpuSpec(product=one) for one in products)
        )
        self.node = SimulatedNode(spec, monotonic_ns=lambda: self.now_ns, seed=1)
        self.node.gpus()
        self.path = folder / "faults"
        self.file = FaultFile(self.path, (self.node,))

    def say(self, text):
        with self.path.open("a") as out:
            out.write(text)
        return self.file.apply_new_faults()

    def do(self, fault, **fields):
        return self.say(json.dumps({"fault": fault, **fields}) + "\n")

    @property
    def gpu(self) -> SimGpu:
        return self.node.devices[0]

    def reading(self, reading):
        return self.node.read(self.gpu.uuid).values[reading]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path, "h100-sxm5-80gb", "a100-sxm4-80gb")


def test_a_line_is_done_once_when_it_is_whole(scene):
    assert scene.file.apply_new_faults() == 0
    assert scene.say('{"fault": "lose", ') == 0
    assert scene.gpu.health is SimHealth.OK
    assert scene.say('"gpu": 0}\n\n') == 2
    assert scene.gpu.health is SimHealth.LOST
    assert scene.file.apply_new_faults() == 0
    scene.do("restore", gpu=0)
    assert scene.gpu.health is SimHealth.OK


def test_work_that_spins_looks_busy_draws_little_and_gets_nothing_done(scene):
    scene.node.set_load(scene.gpu.uuid, GpuLoad(utilization_ratio=1.0, memory_bytes=2**30))
    busy_w = scene.gpu.power_mw / 1000
    scene.do("conduct", gpu=0, work="spinning")
    before = scene.gpu.work_done(scene.now_ns)
    scene.now_ns += 10 * SECOND
    done = scene.gpu.work_done(scene.now_ns).subtract(before)
    assert (done.active_s, done.work_s) == (pytest.approx(10.0), 0.0)
    assert scene.reading(Reading.UTILIZATION_RATIO) == 1.0
    assert scene.gpu.power_mw / 1000 < scene.gpu.product.idle_w + 0.2 * (busy_w - scene.gpu.product.idle_w)
    scene.do("conduct", gpu=0, work="busy")
    assert scene.gpu.power_mw / 1000 == busy_w


def test_idle_work_holds_memory_and_stays_idle_until_it_is_taken_back(scene):
    scene.do("conduct", gpu=0, work="idle")
    scene.node.set_load(scene.gpu.uuid, GpuLoad(utilization_ratio=1.0, memory_bytes=2**30))
    assert scene.gpu.power_mw / 1000 == scene.gpu.product.idle_w
    assert scene.gpu.memory_used_bytes == 2**30
    assert len(scene.node.processes(scene.gpu.uuid)) == 1
    scene.do("conduct", gpu=0, work="busy")
    assert scene.gpu.power_mw / 1000 == pytest.approx(scene.gpu.product.busy_w)


def test_each_other_fault_does_what_it_says(scene):
    scene.node.take_events()
    scene.do("xid", gpu=0, code=79)
    assert [event.code for event in scene.node.take_events()] == [79]
    scene.do("fail_memory", gpu=0, failed=True)
    assert scene.node.read_slow(scene.gpu.uuid)[Reading.ROW_REMAP_FAILED] == 1.0
    scene.do("fail_memory", gpu=0, failed=False)
    assert scene.node.read_slow(scene.gpu.uuid)[Reading.ROW_REMAP_FAILED] == 0.0
    scene.do("limit_power", gpu=0, watts=300)
    assert scene.reading(Reading.POWER_LIMIT_W) == 300.0
    true_w = scene.reading(Reading.POWER_W)
    scene.do("skew", gpu=0, gain=1.5)
    assert scene.reading(Reading.POWER_W) == pytest.approx(1.5 * true_w, abs=0.01)
    scene.do("hold", gpu=0, pid=4711)
    assert [one.pid for one in scene.node.processes(scene.gpu.uuid)] == [4711]
    scene.do("release", gpu=0, pid=4711)
    assert scene.node.processes(scene.gpu.uuid) == ()
    scene.do("ask_mode", gpu=1, enabled=True)
    assert scene.node.devices[1].identity.mig_pending
    scene.do("reset", gpu=1)
    assert scene.node.devices[1].identity.mig_enabled
    scene.do("hang", gpu=0)
    assert scene.gpu.health is SimHealth.HUNG
    scene.do("slow_calls", seconds=0.001)
    assert scene.node.operations.pause is not None
    scene.do("slow_calls", seconds=0)
    assert scene.node.operations.pause is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lose", "Expecting value"),
        ("[]", "the line: is not an object"),
        ('{"fault": "explode", "gpu": 0}', "fault: 'explode' is not one of lose, "),
        ('{"fault": ["lose"], "gpu": 0}', "is not one of lose"),
        ('{"fault": "lose"}', "gpu: None is not an index of the 2 GPUs of n"),
        ('{"fault": "lose", "gpu": 2}', "gpu: 2 is not an index"),
        ('{"fault": "lose", "gpu": true}', "gpu: True is not an index"),
        ('{"fault": "lose", "gpu": 0, "node": "m"}', "node: 'm' is not a node of this agent"),
        ('{"fault": "lose", "gpu": 0, "code": 1}', "code: is not a field of lose"),
        ('{"fault": "xid", "gpu": 0, "code": "79"}', "code: is '79'; xid wants int"),
        ('{"fault": "xid", "gpu": 0, "code": true}', "code: is True; xid wants int"),
        ('{"fault": "conduct", "gpu": 0, "work": "lazy"}', "work: 'lazy' is not one of busy, idle, spinning"),
        ('{"fault": "slow_calls", "seconds": 61}', r"seconds: 61 is not in \[0, 60\]"),
        ('{"fault": "skew", "gpu": 0, "gain": 11}', r"gain: 11 is not in \[0.1, 10\]"),
        ('{"fault": "limit_power", "gpu": 0, "watts": 5}', r"limit_w: 5 W is not in"),
    ],
)
def test_a_line_that_is_no_fault_says_where_and_what_to_write(scene, line, said):
    scene.say("\n")
    with pytest.raises(FaultFileError, match=rf"faults: line 2: .*{said}"):
        scene.say(line + "\n")


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    scene = Scene(tmp_path)
    scene.path.mkdir()
    with pytest.raises(FaultFileError, match=r"cannot be read .*; make it readable"):
        scene.file.apply_new_faults()
