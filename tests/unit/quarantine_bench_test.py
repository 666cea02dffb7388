"""The benchmark of quarantine: a bad machine takes in most jobs without it, and a handful with it."""

from bench.quarantine import Cluster


def play(*, has_bad, quarantines, failing=0.02):
    return Cluster(1, has_bad=has_bad, quarantines=quarantines, failing=failing).play(1.0)


def test_a_bad_machine_takes_in_a_handful_of_jobs_instead_of_most():
    without, found = (play(has_bad=True, quarantines=on) for on in (False, True))
    assert (without.closed, found.closed) == (0, 1)
    assert without.lost > 0.4 * without.came
    assert found.lost <= 20


def test_no_good_node_is_closed_though_much_fails_at_once():
    for failing in (0.02, 0.3):
        found = play(has_bad=False, quarantines=True, failing=failing)
        assert (found.closed, found.lost) == (0, 0)
        assert found.ended > 100
