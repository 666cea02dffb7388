"""One table of GPU names: every way to write a model leads to the catalogue's name, everywhere that people write one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_agent.simulation.spec import GpuSpec, SpecError, find_product
from eelgrid_controller.cli.frontier_inputs import read_points, read_services
from eelgrid_controller.core.workloads import find_existing_workload, resolve_models
from eelgrid_controller.engines.kubernetes.model.annotations import parse_gpu_models
from eelgrid_controller.replay.csv_reader import TraceMalformed
from eelgrid_controller.replay.trace_loading import TraceSearch, find_trace
from eelgrid_protos.catalogue import (
    GpuNameError,
    find_exact_model,
    load_catalogue,
    resolve_gpu_model,
    resolve_gpu_models,
    resolve_product,
)
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import WorkloadPhase

H100 = "H100-80GB-HBM3"
PRODUCTS = load_catalogue().products


def resolve(name, *reported):
    return resolve_gpu_model(name, "gpu_models", reported=reported)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3",  # NVML
        "NVIDIA-H100-80GB-HBM3",  # GPU feature discovery
        "H100-80GB-HBM3",
        "h100-80gb-hbm3",
        "H100-SXM5-80GB",  # the key
        "h100_sxm5_80gb",
        "h100",
        "H100-SXM",
        "h100-80gb-h",
        " h100 sxm5 ",
    ],
)
def test_every_way_to_write_a_model_is_that_model(name):
    assert resolve(name) == H100
    assert resolve_product(name, "gpu").key == "h100-sxm5-80gb"


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_every_name_of_every_product_is_its_model(product):
    for name in (product.key, product.model, *product.nvml_names, *product.aliases):
        for written in (name, name.lower(), name.upper(), name.replace(" ", "-")):
            assert resolve(written) == product.model
            assert resolve(written, "T4", product.model) == product.model


def test_what_registered_nodes_report_comes_first():
    assert resolve("h100", "H100-PCIe") == "H100-PCIe"
    assert resolve("a100-80gb", "A100-SXM4-80GB", "T4") == "A100-SXM4-80GB"
    assert resolve("h100", "T4") == H100
    with pytest.raises(GpuNameError, match="did you mean H100-PCIe or H100-80GB-HBM3"):
        resolve("h100", "H100-PCIe", H100)
    # A model that the catalogue lacks stays usable by its own name, and by a beginning of it.
    assert resolve("Own-9", "Own-9") == resolve("own-9", "Own-9") == resolve("ow", "Own-9", "T4") == "Own-9"
    assert resolve("A100", "A100") == "A100"


@pytest.mark.parametrize(
    ("name", "reported", "words"),
    [
        ("a100", (), "fits several GPU models; did you mean A100-SXM4-40GB, A100-PCIE-40GB, A100-SXM4-80GB or A100"),
        ("h100-80gb", (), "did you mean H100-PCIe or H100-80GB-HBM3"),
        ("H10O", (), "no known GPU model; did you mean H100-80GB-HBM3"),
        ("H2000", ("T4", "A10"), "did you mean H200"),
        ("zzz", ("T4", "A10"), "in use are A10, T4"),
        ("", (), "no known GPU model"),
        ("nvidia", (), "no known GPU model"),
    ],
)
def test_an_error_names_the_field_the_candidates_and_what_may_be_meant(name, reported, words):
    with pytest.raises(GpuNameError) as caught:
        resolve(name, *reported)
    assert caught.value.field == "gpu_models"
    assert words in str(caught.value)


@given(st.text(max_size=40), st.lists(st.text(max_size=12), max_size=4))
def test_any_text_is_a_known_model_or_refused(name, reported):
    try:
        found = resolve(name, *reported)
    except GpuNameError:
        return
    assert found in {*reported, *(product.model for product in PRODUCTS.values())}
    assert resolve(found, *reported) == found


def test_several_names_of_one_model_are_one():
    assert resolve_gpu_models(["h100", "NVIDIA-H100-80GB-HBM3", "t4"], "x") == (H100, "T4")
    assert find_exact_model("NVIDIA H200") == "H200"
    assert find_exact_model("H100-8") is None


def with_models(request, *models):
    spec = replace(request.spec, request=replace(request.spec.request, gpu_models=models))
    return replace(request, spec=spec)


def test_the_core_keeps_canonical_names_and_knows_a_repeated_request():
    core = build_core(build_node("a"))  # of G2
    placed = core.submit(with_models(build_request("w", gpus=1), "g2", "NVIDIA H100 80GB HBM3"), now_ns=2)
    assert placed.result.phase is WorkloadPhase.PLACED
    assert placed.result.spec.request.gpu_models == ("G2", H100)
    # The fleet changes, and h100 would be another model by now.
    request = with_models(build_request("h", gpus=1), "G2", "h100")
    first = core.submit(request, now_ns=3).result
    inventory = build_node("b")
    gpus = tuple(replace(gpu, model="H100-PCIe") for gpu in inventory.gpus)
    core.register_node(replace(inventory, gpus=gpus), now_ns=4)
    assert core.submit(request, now_ns=5).events == ()
    again = resolve_models(core.state, core.snapshot, request)
    assert find_existing_workload(core.state, again) == first


def test_the_core_refuses_what_fits_nothing_or_several():
    core = build_core(build_node("a"))
    for name, words in (("H10O", "did you mean H100-80GB-HBM3"), ("a100", "did you mean A100-SXM4-40GB")):
        with pytest.raises(InvalidArgument) as caught:
            core.submit(with_models(build_request("w", gpus=1), name), now_ns=2)
        (violation,) = caught.value.violations
        assert violation.field == "spec.request.gpu_models"
        assert words in violation.remedy


def test_a_fleet_file_takes_any_name_of_a_product():
    assert find_product(GpuSpec(product="NVIDIA H100 80GB HBM3"), load_catalogue()).key == "h100-sxm5-80gb"
    with pytest.raises(SpecError, match=r"did you mean A100-SXM4-40GB"):
        find_product(GpuSpec(product="A100"), load_catalogue())


def test_an_annotation_takes_labels_and_whole_names():
    key = "eelgrid.io/gpu-models"
    assert parse_gpu_models({key: "NVIDIA-H100-80GB-HBM3, h100-sxm5-80gb, a100"}) == (H100, "a100")


def test_a_trace_and_its_tasks_may_name_a_model_differently(tmp_path):
    (tmp_path / "nodes.csv").write_text("name,cpu_milli,memory_mib,gpus,gpu_model\na,1000,1,1,h100-sxm5-80gb\n")
    tasks = "name,arrival_s,cpu_milli,memory_mib,gpus,gpu_models\nt,0,1,1,1,{}\n"
    search = TraceSearch(environment={}, directory=tmp_path, project=tmp_path, cache=tmp_path, fetch=None)
    (tmp_path / "tasks.csv").write_text(tasks.format("NVIDIA H100 80GB HBM3|h100"))
    found = find_trace(str(tmp_path), "default", None, search)
    assert found.nodes[0].gpu_model == H100
    assert found.tasks[0].gpu_models == (H100,)
    (tmp_path / "tasks.csv").write_text(tasks.format("a100"))
    with pytest.raises(TraceMalformed, match=r"task t, column gpu_models.*did you mean"):
        find_trace(str(tmp_path), "default", None, search)


def test_a_frontier_takes_any_name(tmp_path):
    services, points = tmp_path / "services.yaml", tmp_path / "points.csv"
    service = "services:\n- {name: a, workload: w, rate_hz: 1.0, quantile: 0.95}\nfleet:\n"
    services.write_text(service + "  h100: 8\n  A100: {gpus: 2, idle_w: 50}\n")
    points.write_text("workload,gpu_model,throughput_hz\nw,NVIDIA H100 80GB HBM3,1\nw,A100,1\n")
    pools = read_services(services).pools
    assert list(pools) == [H100, "A100"]
    assert [one.configuration.gpu_model for one in read_points(points, tuple(pools))] == [H100, "A100"]
