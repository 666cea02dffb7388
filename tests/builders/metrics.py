"""Frames of which every metric has something to show."""

from eelgrid_agent.devices.port import FAST_READINGS, INSTANCE_READINGS, SLOW_READINGS, InstanceReadings
from eelgrid_agent.devices.port import LATENCY_BUCKETS_S as CALL_BOUNDS_S
from eelgrid_agent.metrics.snapshot import (
    AgentSnapshot,
    AgentView,
    GpuView,
    GuardView,
    HostView,
    LatencyDistribution,
    NodeMetricsView,
    OwnersView,
    ProcessView,
    TimedValues,
    WorkerView,
)
from eelgrid_protos.agent_metrics import OWNER_LABELS
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance, Reading

HOST_READINGS = [reading for reading in Reading if reading >= Reading.HOST_CPU_UTILIZATION_RATIO]


def build_gpu_view(uuid="GPU-1", value=0.5, **changes):
    """A GPU of which every reading has a value."""
    gpu = Gpu(
        uuid=uuid,
        index=0,
        product="A100",
        model="A100",
        pci_bus_id="0:1",
        memory_bytes=10,
        power_limit_default_w=400.0,
        power_limit_min_w=100.0,
        power_limit_max_w=500.0,
        mig_capable=True,
        mig_enabled=True,
        gpu_instances=(
            GpuInstance(
                id=3,
                profile_id=9,
                profile="3g.20gb",
                start=4,
                size=4,
                compute_instances=(ComputeInstance(id=0, uuid="MIG-x", generation=2),),
            ),
        ),
    )
    options = {
        "quick": TimedValues(values=dict.fromkeys(FAST_READINGS, value), age_s=0.5),
        "slow": TimedValues(values=dict.fromkeys(SLOW_READINGS, value), age_s=4.0),
        "instances": (InstanceReadings(gpu_instance_id=3, values=dict.fromkeys(INSTANCE_READINGS, value)),),
        "instances_age_s": 4.0,
        "energy_uncertainty_j": 1.0,
        "xids": {"79": 2},
        "xid_last_s": {"79": 1.7e9},
        "quarantined": False,
        "enforcement_suspended": True,
        "layout_unmet": False,
        "anomalies": {"held_idle": True},
        "unattributed_j": {"unallocated": 3.0},
        "ended_j": 4.0,
    }
    return GpuView(gpu=gpu, **(options | changes))


def build_holder(**owner):
    """The labels of whoever holds GPU-1."""
    return ("GPU-1", *[owner.get(label, "") for label in OWNER_LABELS])


def build_share(energy_j=5.0, **owner):
    """One share of GPU-1: its labels and its joules."""
    return (*build_holder(**owner), "active", "exclusive", "high"), energy_j


def build_snapshot(*gpus, shares=(), value=0.5):
    """Every metric has something to show."""
    return AgentSnapshot(
        agent=AgentView(
            version="1",
            nodes=1,
            connected_nodes=1,
            samples=2,
            batches=3,
            dropped_samples=4,
            connections=5,
            uncounted_s=6.0,
            spool_ticks=7,
            batches_under_way=8,
            sample_age_s=0.1,
            leases={("slurm", "held"): 1},
            lease_refusals={"slurm": 1},
            collection_s={"quick": 0.001},
            calls={"read": LatencyDistribution(below=tuple(range(3, len(CALL_BOUNDS_S) + 4)), sum_s=1.5)},
            process=ProcessView(cpu_s=1.0, resident_bytes=2.0, started_s=3.0, threads=4.0),
            worker=WorkerView(starts=1, hangs=0, left_behind=0, hung_gpus=0, cpu_s=0.5, resident_bytes=9.0),
        ),
        node=NodeMetricsView(
            name="n",
            pool="p",
            driver_version="580",
            boot_id="b",
            simulated=True,
            access="root",
            host=HostView(cpu_milli=1500, memory_bytes=10, values=dict.fromkeys(HOST_READINGS, value)),
            guard=GuardView(
                plan_epoch=7,
                enforcing=True,
                lease_left_s=30.0,
                budget_w=1000.0,
                budget_fixed=1,
                drift_repairs={"power_limit": 1},
                refusals={"clamp": 2},
            ),
            gpus=gpus or (build_gpu_view(value=value),),
            owners=OwnersView(
                energy_j=dict(shares or (build_share(namespace="a", pod="b"),)),
                idle_since_s={build_holder(namespace="a", pod="b"): 1.7e9},
            ),
        ),
    )
