"""The openb reader: good files in full, bad ones with the place and the remedy."""

import pytest

from eelgrid_controller.replay import csv_reader, openb
from eelgrid_controller.replay.csv_reader import TraceMalformed, TraceMissing, TraceTooLarge
from eelgrid_controller.replay.openb import TraceNode, TraceTask
from eelgrid_protos import codec
from eelgrid_protos.messages import SubmitWorkloadRequest, WorkloadKind
from eelgrid_protos.quantities import MIB

NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
TASKS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
SHORT = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"


@pytest.fixture
def written(tmp_path):
    def write(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_nodes(written):
    path = written(NODES + "n0,64000,262144,2,P100\nn1,32000,1024,0,\n")
    assert openb.read_nodes(path) == (
        TraceNode(name="n0", cpu_milli=64_000, memory_bytes=262_144 * MIB, gpu_count=2, gpu_model="P100"),
        TraceNode(name="n1", cpu_milli=32_000, memory_bytes=1024 * MIB, gpu_count=0, gpu_model=""),
    )


def test_tasks_with_all_columns(written):
    path = written(TASKS + "p0,12000,16384,1,460,T4|A10|T4,LS,Running,0,12537496,0\n")
    (task,) = openb.read_tasks(path)
    assert task == TraceTask(
        name="p0",
        cpu_milli=12_000,
        memory_bytes=16_384 * MIB,
        gpu_count=1,
        gpu_milli=460,
        gpu_models=("T4", "A10"),  # named twice in the published lists
        qos="LS",
        arrival_s=0.0,
        duration_s=12_537_496.0,
    )


@pytest.mark.parametrize(
    ("moments", "expected"),
    [(",,", (None, None)), ("7,,", (7.0, None)), ("7,7,", (7.0, 0.0)), ("7,9,8", (7.0, 2.0))],
)
def test_moments_as_far_as_the_list_says_them(written, moments, expected):
    (task,) = openb.read_tasks(written(TASKS + f"p0,1,1,0,0,,LS,Running,{moments}\n"))
    assert (task.arrival_s, task.duration_s) == expected


def test_a_task_that_goes_before_it_comes(written):
    with pytest.raises(TraceMalformed, match="line 2, column deletion_time: is before creation_time"):
        openb.read_tasks(written(TASKS + "p0,1,1,0,0,,LS,Running,7,6,7\n"))


def test_tasks_with_the_first_five_columns_a_byte_order_mark_and_empty_lines(written):
    path = written(("\ufeff" + SHORT + "\np0,1000,0,0,0\r\n\r\np1,0,5,8,1000\n").encode())
    first, second = openb.read_tasks(path)
    assert (first.gpu_count, first.gpu_models, second.gpu_count, second.gpu_milli) == (0, (), 8, 1000)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        (SHORT + "p0,12x,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,-1,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,1.5,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,nan,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,²,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,99999999999,16384,1,1000\n", 2, "cpu_milli"),
        (SHORT + "p0,1,1,1,1000\np1,1,1,65,1000\n", 3, "num_gpu"),
        (SHORT + "p0,1,1,1,1001\n", 2, "gpu_milli"),
        (SHORT + "p0,1,1,0,500\n", 2, "gpu_milli"),
        (SHORT + "p0,1,1,1,0\n", 2, "gpu_milli"),
        (SHORT + "p0,1,1,2,500\n", 2, "gpu_milli"),
        (SHORT + "p0,0,0,0,0\n", 2, "cpu_milli"),
        (SHORT + ",1,1,0,0\n", 2, "name"),
        (SHORT + "p0,1,1,0,0\np0,1,1,0,0\n", 3, "name"),
        (SHORT + "p0,1,1,0\n", 2, "gpu_milli"),
        (SHORT + "p0,1,1,0,0,6\n", 2, "gpu_milli"),
        (TASKS + "p0,1,1,0,0,T4,LS,Running,0,0,0\n", 2, "gpu_spec"),
        ("name,cpu_milli,memory_mib,num_gpu\np0,1,1,0\n", 1, "gpu_milli"),
        ("", 1, "name"),
    ],
)
def test_a_bad_cell_is_named(written, text, line, column):
    path = written(text)
    with pytest.raises(TraceMalformed) as caught:
        openb.read_tasks(path)
    assert caught.value.place == f"{path}, line {line}, column {column}"
    assert caught.value.problem
    assert caught.value.remedy


@pytest.mark.parametrize("row", ["n0,1,1,2,\n", "n0,1,1,0,T4\n", "n0,1,1,many,T4\n"])
def test_a_bad_node_is_named(written, row):
    with pytest.raises(TraceMalformed, match="line 2"):
        openb.read_nodes(written(NODES + row))


def test_no_rows_no_text_no_file_no_csv(written, tmp_path):
    with pytest.raises(TraceMalformed, match="no row"):
        openb.read_tasks(written(SHORT))
    with pytest.raises(TraceMalformed, match="UTF-8"):
        openb.read_tasks(written(b"name,cpu_milli\xff\xfe"))
    with pytest.raises(TraceMalformed, match="no CSV"):
        openb.read_tasks(written(SHORT + '"p0"x,1,1,0,0\n'))
    with pytest.raises(TraceMissing, match="check the path"):
        openb.read_tasks(tmp_path / "absent.csv")


def test_sizes_are_bounded(written, tmp_path, monkeypatch):
    monkeypatch.setattr(openb, "TASKS_MOST", 1)
    with pytest.raises(TraceTooLarge, match="past 1 rows"):
        openb.read_tasks(written(SHORT + "p0,1,1,0,0\np1,1,1,0,0\n"))
    huge = tmp_path / "huge.csv"
    with huge.open("wb") as stream:
        stream.truncate(csv_reader.FILE_BYTES_MOST + 1)  # sparse
    with pytest.raises(TraceTooLarge, match="MiB"):
        openb.read_tasks(huge)


def test_a_task_becomes_a_request_that_the_contract_takes():
    task = TraceTask(
        name="openb-pod-0001",
        cpu_milli=6000,
        memory_bytes=MIB,
        gpu_count=1,
        gpu_milli=460,
        gpu_models=("T4",),
        qos="LS",
    )
    request = openb.submission_of_task(task, prefix="again-")
    assert codec.decode_message(SubmitWorkloadRequest, codec.encode_message(request)) == request
    assert request.workload_id == "again-openb-pod-0001"
    assert request.spec.kind is WorkloadKind.INFERENCE_SERVICE
    assert request.spec.request.gpu_models == ("T4",)
