"""eelctl submit: flags, YAML, and that a mistake submits nothing."""

import functools
from dataclasses import replace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from tests.strategies import message

from eelgrid_controller.cli.connection import RequestRefused
from eelgrid_controller.cli.workloads import read_workloads
from eelgrid_protos.messages import (
    JobArrayRequest,
    Locality,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadSpec,
)
from eelgrid_protos.plain_messages import to_plain

GIB = 1024**3


@pytest.fixture
def submit(eelctl):
    return functools.partial(eelctl.run, "submit")


def test_flags(submit, fake):
    result = submit(
        "--name",
        "llm",
        "--kind",
        "training_job",
        "--cpu",
        "2.5",
        "--memory",
        "16GiB",
        "--gpus",
        "4",
        "--gpu-model",
        "A10, T4",
        "--replicas",
        "2",
        "--namespace",
        "ml",
        "--user",
        "ada",
        "--queue",
        "q",
        "--label",
        "k=v",
        "--label",
        "x=",
        "--priority",
        "-5",
        "--id",
        "llm-1",
        "--locality",
        "pack",
    )
    assert result.exit_code == 0, result.output
    assert "  locality   pack\n" in result.output
    assert fake.workloads["llm-1"].spec == WorkloadSpec(
        name="llm",
        kind=WorkloadKind.TRAINING_JOB,
        replicas=2,
        namespace="ml",
        user="ada",
        queue="q",
        priority=-5,
        labels={"k": "v", "x": ""},
        locality=Locality.PACK,
        request=ResourceRequest(
            cpu_milli=2500, memory_bytes=16 * GIB, gpu_count=4, gpu_milli=1000, gpu_models=("A10", "T4")
        ),
    )


def test_a_share_means_one_gpu_and_gpus_mean_whole_ones(submit, fake):
    submit("--name", "a", "--gpu-share", "0.25", "--id", "a")
    submit("--name", "b", "--gpus", "1", "--id", "b")
    submit("--name", "c", "--cpu", "1", "--id", "c")
    found = {name: (w.spec.request.gpu_count, w.spec.request.gpu_milli) for name, w in fake.workloads.items()}
    assert found == {"a": (1, 250), "b": (1, 1000), "c": (0, 0)}


def test_dry_run_changes_nothing(submit, fake):
    result = submit("--name", "a", "--cpu", "1", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("dry run: nothing was changed\n")
    assert fake.workloads == {}


def test_documents_from_stdin(submit, fake):
    text = (
        "name: x\nid: x1\nrequest: {cpu: 2.5, memory: 16GiB, gpus: 1}\n---\nname: y\nid: y1\nrequest: {cpu_milli: 7}\n"
    )
    result = submit("-f", "-", input=text)
    assert result.exit_code == 0, result.output
    assert fake.submitted == ["x1", "y1"]
    assert fake.workloads["x1"].spec.request.memory_bytes == 16 * GIB


def test_a_mistake_in_the_last_document_submits_nothing(submit, fake, tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text("name: x\nrequest: {cpu: 1}\n---\nname: y\nrequest: {cpus: 1}\n")
    result = submit("-f", str(path))
    assert result.exit_code == 5
    assert f"{path}, document 2" in result.stderr
    assert "request.cpus: is no field here" in result.stderr
    assert fake.calls == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "contains no workload"),
        ("---\n---\n", "contains no workload"),
        ("- a\n- b\n", "document 1: is not a mapping"),
        ("name: [", "line 1"),
        ("name: !!python/object:os.system x\n", "could not determine a constructor"),
        ("name: x\n", "request: is missing"),
        ("name: 7\nrequest: {cpu: 1}\n", "name: is 7"),
        ("name: x\nrequest: {cpu: 1, cpu_milli: 1000}\n", "request.cpu: is given together with cpu_milli"),
        ("name: x\nrequest: {cpu: lots}\n", "request.cpu: is 'lots'"),
        ("name: x\nrequest: {memory: -1}\n", "request.memory: is -1"),
        (
            "name: x\nrequest: {memory: 8}\n",
            "request.memory: is 8, which is less than 1 MiB without a unit; write 8GiB",
        ),
        ("name: x\nrequest: {memory: '512'}\n", "write 512GiB"),
        ("name: x\nrequest: {gpus: 2, gpu_share: 0.5}\n", "gpu_milli: is a share of several GPUs"),
        ("name: x\nrequest: {cpu: .nan}\n", "request.cpu: is nan"),
        ("name: x\nrequest: [1]\n", "request: is list"),
        ("name: x\nkind: service\nrequest: {cpu: 1}\n", "use one of"),
        ("name: x\nspec: 3\n", "spec"),
        ("name: x\nreplicas: 0\nrequest: {cpu: 1}\n", "replicas"),
    ],
)
def test_what_a_file_may_get_wrong(text, complaint):
    with pytest.raises(RequestRefused) as caught:
        read_workloads(text, "jobs.yaml")
    told = "\n".join([caught.value.message, *map(str, caught.value.violations)])
    assert complaint in told
    assert caught.value.remedy


def test_too_many_documents():
    with pytest.raises(RequestRefused, match="10001 documents"):
        read_workloads("a: 1\n---\n" * 10_001, "jobs.yaml")


@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
@given(message(SubmitWorkloadRequest))
def test_what_get_prints_can_be_submitted_again(request):
    document = {"workload_id": request.workload_id, "spec": to_plain(request.spec), "phase": "placed", "revision": 3}
    (read,) = read_workloads(yaml.safe_dump(document, allow_unicode=True), "w.yaml")
    # Which element of an array it is, the controller says.
    assert (read.spec, read.workload_id) == (replace(request.spec, array=None), request.workload_id)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        ("0-9%2", JobArrayRequest(indexes="0-9%2")),
        ("7", JobArrayRequest(indexes="7")),
        ("{parameters: ['lr=1,2'], indexes: '%3'}", JobArrayRequest(parameters=("lr=1,2",), indexes="%3")),
    ],
)
def test_a_file_submits_an_array_by_its_indexes_or_its_parameters(array, expected):
    (read,) = read_workloads(f"name: x\nrequest: {{cpu: 1}}\narray: {array}\n", "w.yaml")
    assert (read.array, read.spec.array) == (expected, None)
    with pytest.raises(RequestRefused, match=r"w\.yaml, document 1"):
        read_workloads("name: x\nrequest: {cpu: 1}\narray: {}\n", "w.yaml")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give --name"),
        (("--name", "a", "--cpu", "many"), "not a number of CPUs"),
        (("--name", "a", "--gpu-share", "2"), "not a share of a GPU"),
        (("--name", "a", "--label", "novalue"), "write --label key=value"),
        (("--name", "a", "--kind", "cron"), "is not one of"),
        (("-f", "/nowhere/jobs.yaml"), "No such file"),
        (("-f", "-", "--cpu", "1"), "--cpu and -f exclude each other"),
    ],
)
def test_usage_errors_are_code_2(submit, fake, arguments, complaint):
    result = submit(*arguments, input="name: x\nrequest: {cpu: 1}\n")
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr
    assert fake.calls == []


def test_a_binary_file(submit, tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    result = submit("-f", str(path))
    assert result.exit_code == 5
    assert "not UTF-8" in result.stderr


def test_a_bare_number_of_memory_is_asked_for_its_unit(submit, fake):
    result = submit("--name", "x", "--cpu", "1", "--memory", "8")
    assert result.exit_code == 2
    assert "write 8GiB" in result.stderr
    assert fake.calls == []


def test_an_unknown_field_names_those_that_a_file_has(eelctl, tmp_path):
    file = tmp_path / "jobs.yaml"
    file.write_text("name: a\nrequest: {cpus: 2}\n")
    said = eelctl("submit", "-f", file, code=5).stderr
    assert "request.cpus: is no field here; use one of cpu (or cpu_milli), memory (or memory_bytes)" in said
