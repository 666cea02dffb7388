"""Watts: from the catalogue, from the limits, or from a stated default."""

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.placement.power import DEFAULT_BUSY_W, IDLE_SHARE, PriorPowerModel
from eelgrid_protos import catalogue
from eelgrid_protos.messages import Gpu

MODEL = PriorPowerModel(catalogue.load_catalogue())


def gpu(**fields):
    return Gpu(**({"uuid": "GPU-1", "index": 0, "product": "Prototype 9", "model": "P9"} | fields))


def test_the_sources_in_their_order():
    assert MODEL.gpu(gpu(catalogue_key="openb-t4")) == (10.0, 70.0, "catalogue")
    known = next(iter(catalogue.load_catalogue().products.values()))
    assert MODEL.gpu(gpu(product=known.nvml_names[0], memory_bytes=known.memory_bytes))[:2] == (
        known.idle_w,
        known.busy_w,
    )
    assert MODEL.gpu(gpu(power_limit_default_w=500.0)) == (50.0, 500.0, "limits")
    assert MODEL.gpu(gpu()) == (IDLE_SHARE * DEFAULT_BUSY_W, DEFAULT_BUSY_W, "default")
    # A key of a newer catalogue is no key here.
    assert MODEL.gpu(gpu(catalogue_key="b900")).source == "default"


def test_the_cluster_draws_what_the_paper_says():
    core = build_core(build_node("a", gpus=8, model="G2", cpu=96))
    idle_w = 8 * 30 + 3 * 15
    assert core.modelled_power_w() == idle_w
    core.submit(build_request(gpus=1, milli=10, cpu=1), now_ns=1)
    assert core.modelled_power_w() == idle_w + (150 - 30) + (120 - 15)
    core.submit(build_request(gpus=1, milli=10, cpu=1), now_ns=2)
    assert core.modelled_power_w() == idle_w + (150 - 30) + (120 - 15)
    core.mark_node_lost("a", now_ns=3)
    assert core.modelled_power_w() == pytest.approx(idle_w + 225)
