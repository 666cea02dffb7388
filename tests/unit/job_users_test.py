"""As which user of the machine a job runs, and which are refused with what remedy."""

from types import SimpleNamespace

import pytest

from eelgrid_agent.engine.users import JobUser, JobUsers, RunAs, UserRefused

ALICE, DAEMON, ROOT, NOBODY = 1001, 2, 0, 65534
NUMBERS = {"alice": ALICE, "bob": 1002, "daemon": DAEMON, "root": ROOT, "nobody": NOBODY}


def find(name):
    return SimpleNamespace(pw_name=name, pw_uid=NUMBERS[name], pw_gid=NUMBERS[name] + 5, pw_dir=f"/home/{name}")


def users(own_uid=ROOT, **known):
    return JobUsers(own_uid=own_uid, find=find, list_groups=lambda _, gid: [gid, 44], **known)


def test_an_owner_runs_as_the_user_of_that_name_with_its_groups():
    assert users().resolve("alice") == JobUser("alice", ALICE, ALICE + 5, (ALICE + 5, 44), "/home/alice")
    assert users().resolve("nobody").uid == NOBODY
    assert users().changes_user


def test_a_name_of_a_certificate_is_mapped():
    found = users(users={"alice@example.org": "alice", "daemon": "daemon"})
    assert found.resolve("alice@example.org").name == "alice"
    # An account of the system, if an operator says so.
    assert found.resolve("daemon").uid == DAEMON


@pytest.mark.parametrize(
    ("found", "owner", "problem", "remedy"),
    [
        (users(), "", "nobody proved who submitted it, so it would run as root", "with --allow-root"),
        (users(), "root", "root is root here", "submit as another user"),
        (users(users={"alice": "root"}), "alice", "alice is root here", "submit as another user"),
        (users(), "daemon", "is an account of the system (number 2)", "--map-user daemon=daemon"),
        (users(), "carol", "carol is no user of this machine", "--map-user carol=USER"),
        (users(users={"carol": "gone"}), "carol", "gone is no user of this machine", "--map-user carol=USER"),
        (users(ALICE), "bob", "cannot start processes of bob", "start it as root with --run-as owner"),
    ],
)
def test_what_may_not_run_is_refused_with_the_field_and_the_remedy(found, owner, problem, remedy):
    with pytest.raises(UserRefused) as caught:
        found.resolve(owner)
    text = str(caught.value)
    assert text.startswith("user: ")
    assert problem in text
    assert remedy in text
    # The reason of an attempt holds it whole.
    assert len(f"cannot start: {text}") <= 253


def test_an_agent_without_root_runs_its_own_users_jobs_and_those_of_nobody_known():
    assert users(ALICE).resolve("alice") is None
    assert users(ALICE).resolve("") is None
    assert not users(ALICE).changes_user


def test_an_agent_that_runs_all_as_itself_asks_for_no_owner():
    found = users(ALICE, run_as=RunAs.AGENT)
    assert found.resolve("bob") is None
    assert found.resolve("no such user") is None


def test_root_is_allowed_only_if_it_was_said():
    found = users(allows_root=True)
    assert found.resolve("") is None
    assert found.resolve("root") is None
    # Others are still themselves.
    assert found.resolve("alice").uid == ALICE
