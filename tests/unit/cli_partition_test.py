"""eelctl partition: what it shows of a plan and of what stands, and what it sends."""

from eelgrid_protos.messages import (
    EnforcementMode,
    GpuLayout,
    ListPartitionsResponse,
    PartitionedGpu,
    PartitionedService,
    PartitionRecommendation,
    PartitionStatus,
    Policy,
    PoolMode,
    Resident,
    Slice,
    WantedInstance,
)

OFF = GpuLayout(gpu_uuid="GPU-0")
CUT = GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=(WantedInstance(profile="3g.20gb", start=4),))
SITS = (Resident(workload_id="bert", name="b", replica=0, slice=Slice(profile="3g.20gb", start=4)),)
FOUND = PartitionRecommendation(
    recommendation_id="partitions-7-abc",
    revision=7,
    gpus=(
        PartitionedGpu(node_name="n", gpu_index=0, model="A100", before=OFF, after=CUT, residents=SITS),
        PartitionedGpu(node_name="n", gpu_index=1, model="A100", before=OFF, after=OFF, held="job runs on it"),
    ),
    services=(
        PartitionedService(workload_id="bert", name="b", rate_hz=20.0, after_hz=23.5, replicas=1, lowest_share=0.5),
        PartitionedService(workload_id="t5", name="t", rate_hz=20.0, problem="nothing is quick enough"),
    ),
    gpus_after=1.0,
    gain=-3600.0,
    cost=91.0,
    horizon_s=3600.0,
    stages=2,
    gpus_ready=2,
)
STATUS = PartitionStatus(node_name="n", gpu_index=0, model="A100", wanted=CUT, residents=SITS, problem="busy: drain it")


def test_a_plan_is_a_table_of_gpus_and_of_services_and_changes_nothing(eelctl, fake):
    fake.partitioned.found = FOUND
    lines = eelctl("partition", "plan", "--horizon", "60").output.splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert ["n:0", "MIG off", "3g.20gb@4", "bert in 3g.20gb@4"] in cells
    assert ["n:1", "MIG off", "stays: job runs on it", "-"] in cells
    assert ["bert", "20/s", "nothing", "23.5/s", "0 -> 1", "50 %", "-"] in cells
    assert ["t5", "20/s", "nothing", "nothing", "0 -> 0", "-", "nothing is quick enough"] in cells
    assert "0 GPUs in use become 1, in 2 stages; over 3600 s this gains -3,600 GPU-seconds and costs 91 once." in lines
    assert lines[-1] == "Nothing was changed. To apply the plan: eelctl partition apply partitions-7-abc"
    assert (fake.partitioned.horizons, fake.partitioned.applied) == ([60.0], [])


def test_apply_names_a_plan_or_takes_what_is_found(eelctl, fake):
    fake.partitioned.found = FOUND
    fake.partitioned.standing = [
        ListPartitionsResponse(gpus=(STATUS,), stages_left=1, waits_for="GPU 0 of node n: busy: drain it"),
        ListPartitionsResponse(gpus=(PartitionStatus(node_name="n", gpu_index=0, model="A", wanted=CUT, stands=True),)),
    ]
    assert "1 follows when the GPUs are ready" in eelctl("partition", "apply", "partitions-7-abc", "--yes").output
    assert "yes" in eelctl("partition", "apply", "--yes", "--wait", "20").output
    assert fake.partitioned.applied == ["partitions-7-abc"] * 2
    assert "changes 1 GPU (n:0) needs a confirmation" in eelctl("partition", "apply", code=5).stderr
    eelctl("partition", "apply", "partitions-7-abc", code=5)
    assert fake.partitioned.applied == ["partitions-7-abc"] * 2
    eelctl("partition", "apply", "other", "--yes", code=4)


def test_what_does_not_stand_in_time_is_an_error_with_its_reason(eelctl, fake):
    fake.partitioned.found = FOUND
    fake.partitioned.standing = [
        ListPartitionsResponse(gpus=(STATUS,), stages_left=1, waits_for="GPU 0 of node n: busy")
    ]
    assert "GPU 0 of node n: busy" in eelctl("partition", "apply", "--yes", "--wait", "0", code=1).output


def test_show_says_what_stands_and_what_is_refused(eelctl, fake):
    fake.partitioned.standing = [ListPartitionsResponse(gpus=(STATUS,), stages_left=3, waits_for="its agent")]
    said = eelctl("partition", "show").output
    assert "not yet" in said
    assert "busy: drain it" in said
    assert "3 stages to come; its agent" in said
    fake.partitioned.standing = [ListPartitionsResponse()]
    assert "eelctl policy set --partition" in eelctl("partition", "show").output


def test_where_nothing_is_to_be_done_it_says_why(eelctl, fake):
    fake.partitioned.found = PartitionRecommendation(recommendation_id="p", revision=1, horizon_s=60.0, gpus_ready=4)
    assert "no change of the 4 GPUs is worth its cost" in eelctl("partition", "apply", "--yes").output
    fake.partitioned.found = PartitionRecommendation(recommendation_id="p", revision=1, horizon_s=60.0)
    assert "The partition planner manages no GPU" in eelctl("partition", "plan").output
    assert fake.partitioned.applied == []


def test_a_pool_is_handed_over_and_keeps_its_mode(eelctl, fake):
    fake.policy = Policy(revision=1, pools=(PoolMode(pool="a", mode=EnforcementMode.ENFORCE),))
    eelctl("policy", "set", "--partition", "a=on", "--partition", "b=on", "--ahead")
    said = eelctl("policy", "set", "--pool-mode", "a=observe").output
    assert fake.policy.pools == (
        PoolMode(pool="a", mode=EnforcementMode.OBSERVE, partitioned=True),
        PoolMode(pool="b", mode=EnforcementMode.OBSERVE, partitioned=True),
    )
    assert "observe, MIG GPUs managed by the partition planner" in said
    eelctl("policy", "set", "--partition", "b=off")
    assert not fake.policy.pools[1].partitioned
    eelctl("policy", "set", "--partition", "b=perhaps", code=2)
