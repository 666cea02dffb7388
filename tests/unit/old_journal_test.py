"""A data directory that version 0.1.0 wrote: its journal and its checkpoints give the same state, to the digest.

`version_0_1.tar.xz` holds `journal.sqlite3` and `journal.mark` as a controller of 0.1.0 left them: 127 events of eleven
kinds (work placed, scaled, cancelled and deferred, nodes that joined, spoke and were lost, policies, prices, two
starts) and two checkpoints. The digest is what that controller had in memory.
"""

import tarfile
from pathlib import Path

import pytest

from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState

OLD = Path(__file__).parents[1] / "journals" / "version_0_1.tar.xz"
REVISION, CHECKPOINTS = 127, (77, 110)
DIGEST = "8582c3569f3725997ca3bdfc7a3218c5a69ceff155085b89270b2f66f64ef01f"


@pytest.fixture
def journal(tmp_path):
    with tarfile.open(OLD) as archive:
        # Debian's Python 3.11 has no filters yet, and passes this over.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    tmp_path.chmod(0o750)
    opened = open_journal(tmp_path, new_cluster_id="another")
    yield opened
    opened.close()


def digest_of_then(state):
    """The digest without what that version did not count: how much GPU came and left."""
    dumped = state.dump()
    assert dumped["market"].pop("turnover_permille") == 0  # no event of then has one
    assert dumped["market"].pop("stockout_permille") == []
    for newer in ("came_milli", "left_milli"):
        del dumped["market"][newer]
    return state.digest(dumped)


def test_newest_checkpoint_of_an_old_journal_leads_to_its_state(journal):
    recovered = recover_state(journal, ClusterState)
    assert (recovered.checkpoint_seq, recovered.state.revision) == (CHECKPOINTS[-1], REVISION)
    assert digest_of_then(recovered.state) == DIGEST
    assert recovered.healed_count == 0


def test_all_entries_of_an_old_journal_replay_to_the_same_state(journal):
    class WithoutCheckpoints:
        path = journal.path
        entries_after = staticmethod(journal.entries_after)

        @staticmethod
        def newest_checkpoint():
            return None

    recovered = recover_state(WithoutCheckpoints(), ClusterState)
    assert (recovered.replayed, digest_of_then(recovered.state)) == (REVISION, DIGEST)
