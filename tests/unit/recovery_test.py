"""A checkpoint gives back the state that it was made from, also one of an older version; anything else is refused."""

import json
from copy import deepcopy

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.builders.server import MemoryJournal

from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalCorrupt
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import Checkpoint, digest_of


def dumped():
    core = build_core(build_node("a", gpus=2))
    core.submit(build_request(gpus=1, key="one"), now_ns=2)
    return core.state.revision, json.loads(json.dumps(core.state.dump()))


def journal_of(seq, plain, digest=None):
    journal = MemoryJournal()
    journal.write_checkpoint(Checkpoint(seq, plain, digest or digest_of(plain)))
    return journal


def test_a_checkpoint_of_a_version_that_knew_less():
    seq, plain = dumped()
    before = deepcopy(plain)
    for name in ("budgets", "prices", "placement"):
        before["policy"].pop(name, None)
    del before["points"]
    state = recover_state(journal_of(seq, before), ClusterState).state
    assert json.loads(json.dumps(state.dump())) == plain


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: plain["workloads"].append(plain["workloads"][0]),
        lambda plain: plain["nodes"][0].update(plan_epoch=-1, unheard_of=1),
        lambda plain: plain["policy"].update(lease_s=7.0, unheard_of=1),
        lambda plain: plain.pop("demand"),
    ],
)
def test_a_checkpoint_that_is_none_of_ours(spoil):
    seq, plain = dumped()
    spoil(plain)
    with pytest.raises(JournalCorrupt):
        recover_state(journal_of(seq, plain), ClusterState)


def test_a_checkpoint_that_was_altered_since():
    seq, plain = dumped()
    digest = digest_of(plain)
    plain["policy"]["lease_s"] = 33.0
    with pytest.raises(JournalCorrupt, match="does not give back"):
        recover_state(journal_of(seq, plain, digest), ClusterState)
