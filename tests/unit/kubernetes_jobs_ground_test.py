"""What right-sizing is told of nodes and points."""

from tests.builders.kubernetes import A100, H100, build_labelled_node, build_measurements

from eelgrid_controller.engines.kubernetes.model.node_inventory import inventory_of
from eelgrid_controller.engines.kubernetes.model.objects import parse_node
from eelgrid_controller.engines.kubernetes.pods.suspended_job import (
    SizeMeasurement,
    candidate_node_of,
    measured_sizes,
    unmeasured_gpu_counts,
)
from eelgrid_controller.profiles.points import Configuration, Point


def test_points_at_a_limit_a_clock_or_beside_others_say_nothing_of_a_job_alone():
    plain = Configuration(H100, gpus=2)
    odd = [
        Configuration(H100, gpus=2, power_limit_w=300.0),
        Configuration(H100, gpus=2, clock_mhz=900),
        Configuration(H100, gpus=2, processes=2),
    ]
    points = [Point("p", how, 5.0, power_w=900.0) for how in (plain, *odd)]
    assert measured_sizes(points) == (SizeMeasurement(H100, "", 2, 5.0, 5.0, 900.0, 900.0),)
    assert measured_sizes([Point("p", plain, 5.0)])[0].power_low_w == 0.0


def test_numbers_between_two_that_were_measured_with_watts():
    assert unmeasured_gpu_counts(build_measurements({1: (1.0, 9.0), 4: (3.0, 9.0)}), H100) == (4, 2, 3)
    assert unmeasured_gpu_counts(build_measurements({1: (1.0, 9.0), 2: (3.0, 9.0)}), H100) == ()
    assert unmeasured_gpu_counts(build_measurements({4: (1.0, 9.0)}), H100) == ()
    assert unmeasured_gpu_counts(build_measurements({1: (1.0, 0.0), 4: (3.0, 9.0)}), H100) == ()
    assert unmeasured_gpu_counts(build_measurements(), A100) == ()
    assert len(unmeasured_gpu_counts(build_measurements({1: (1.0, 9.0), 512: (3.0, 9.0)}), H100)) == 17


def test_a_node_is_its_inventory_or_its_labels():
    whole = parse_node(build_labelled_node(gpus=4))
    assert candidate_node_of(whole, inventory_of(whole))[1:] == (H100, 4)
    assert candidate_node_of(whole, None)[1:] == (H100, 4)
    cut = parse_node(build_labelled_node(gpus=0, product="NVIDIA-A100-SXM4-80GB", **{"nvidia.com/mig-1g.10gb": "7"}))
    assert candidate_node_of(cut, inventory_of(cut))[1:] == (A100, 0)
    assert candidate_node_of(parse_node(build_labelled_node(gpus=0, product="")), None)[1:] == ("", 0)
