"""Ray: what jobs hold, grouped once for a look, is what one finds for each job by going over everything."""

from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.engines.ray.answers import GpuSlot, RayHolding, RayJob
from eelgrid_controller.engines.ray.following import group_by_job, list_grants, name_ray_job
from eelgrid_protos.messages import Placement, ResourceRequest, Workload, WorkloadPhase, WorkloadSpec
from eelgrid_protos.ray_names import OF_CLIENT, OF_JOB, ORIGIN, SERVE_LABEL

NAMES = {f"id-{number}": f"n{number}" for number in range(3)}
JOBS = [RayJob(job_id="", submission_id="waits"), *(RayJob(job_id=f"0{n}", submission_id=f"s{n}") for n in range(4))]
KEYS = [*(name_ray_job(job, {}) for job in JOBS), "ray-s1.1", "ray-s2.1", "client", "serve"]
PLACES = st.tuples(st.sampled_from(sorted(NAMES.values())), st.frozensets(st.integers(0, 3), max_size=2))


@st.composite
def holdings(draw):
    slots = draw(st.dictionaries(st.integers(0, 3), st.sampled_from((0.5, 1.0)), max_size=2))
    return RayHolding(
        node_id=draw(st.sampled_from(sorted(NAMES))),
        holder=draw(st.text("abc", min_size=1, max_size=3)),
        job_id=draw(st.sampled_from(["", "09", *(job.job_id for job in JOBS)])),
        workload_id=draw(st.sampled_from(["", "client", "serve", "strange", *KEYS[:3]])),
        gpus=draw(st.sampled_from((0.0, 0.5, 1.0, 2.0))),
        slots=tuple(GpuSlot(*one) for one in slots.items()),
    )


@st.composite
def workloads(draw):
    found = {}
    for key in draw(st.frozensets(st.sampled_from(KEYS))):
        labels = {"client": {ORIGIN: OF_CLIENT}, "serve": {SERVE_LABEL: "web/Echo"}}.get(key, {ORIGIN: OF_JOB})
        places = draw(st.lists(PLACES, max_size=3))
        found[key] = Workload(
            workload_id=key,
            spec=WorkloadSpec(name="w", labels=labels, request=ResourceRequest()),
            phase=draw(st.sampled_from((WorkloadPhase.PLACED, WorkloadPhase.PLACED, WorkloadPhase.SUCCEEDED))),
            submitted_ns=1,
            placements=tuple(
                Placement(replica=at, node_name=name, gpu_indexes=tuple(indexes))
                for at, (name, indexes) in enumerate(places)
            ),
        )
    return found


def list_placed(found):
    return [
        (key, one, place) for key, one in found.items() if one.phase is WorkloadPhase.PLACED for place in one.placements
    ]


def is_granted(one, found):
    return any(
        key == one.workload_id and place.node_name == NAMES[one.node_id] and workload.spec.labels.get(ORIGIN) != OF_JOB
        for key, workload, place in list_placed(found)
    )


def find_own(job, held, found):
    """As it is said: used by the job alone, and given by the core to nobody else."""
    mine, others = set(), set()
    for one in held:
        is_mine = one.job_id == job.job_id and not is_granted(one, found)
        (mine if is_mine else others).update((NAMES[one.node_id], slot.gpu) for slot in one.slots)
    for key, _, place in list_placed(found):
        if key.partition(".")[0] != name_ray_job(job, {}):
            others |= {(place.node_name, index) for index in place.gpu_indexes}
    return mine - others if job.job_id else set()


def find_unsaid(job, held, found):
    return {
        NAMES[one.node_id]
        for one in held
        if job.job_id and one.job_id == job.job_id and len(one.slots) < one.gpus and not is_granted(one, found)
    }


@given(st.lists(holdings(), max_size=8), workloads())
def test_grouped_once_is_what_each_job_has_by_going_over_all(held, found):
    grouped = group_by_job(held, NAMES, found, list_grants(found))
    for job in JOBS:
        assert grouped.list_own_devices(job) == find_own(job, held, found)
        assert grouped.list_unsaid_nodes(job) == find_unsaid(job, held, found)
