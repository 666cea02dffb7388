"""Users of jobs: as which user of this machine the process of an assignment runs.

Owns the decision and its refusals. Must not start anything, nor authenticate anybody: the controller names the owner of
a workload only if the owner proved who it is, by a certificate or as a local user, and an empty name is nobody's.

Theory. The safe direction is to refuse: a process runs as the user that its owner is here, or as the agent's own user
where an operator said so (`--run-as agent`) or where the agent is no root and the owner is not known. Certificates may
have any names, among them those of accounts of the system, so names of accounts below the least number of people's are
taken only from an explicit map (`--map-user NAME=USER`); root is refused unless it is allowed.
"""

import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum

from eelgrid_protos.values import dataclass

# Of people's accounts, as in login.defs(5).
PEOPLE_UID_LEAST = 1000


class RunAs(Enum):
    """Whose processes an agent starts."""

    # The owner of each workload.
    OWNER = "owner"
    # All as the agent's own user.
    AGENT = "agent"


class UserRefused(Exception):
    """A process may not run as the user that it would have to."""


@dataclass(frozen=True, slots=True)
class JobUser:
    """A user of this machine with its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUsers:
    """Decides users by the flags of an agent that runs as `own_uid`."""

    own_uid: int
    run_as: RunAs = RunAs.OWNER
    users: Mapping[str, str] = field(default_factory=dict)
    allows_root: bool = False
    find: Callable[[str], pwd.struct_passwd] = pwd.getpwnam
    list_groups: Callable[[str, int], Sequence[int]] = os.getgrouplist

    @property
    def changes_user(self) -> bool:
        """Returns whether processes may have users other than the agent's."""
        return self.own_uid == 0 and self.run_as is RunAs.OWNER

    def resolve(self, owner: str) -> JobUser | None:
        """Returns the user of a process of this owner; None is the agent's own. Raises UserRefused with the remedy."""
        if self.run_as is RunAs.AGENT:
            return None
        if not owner:
            if self.own_uid != 0 or self.allows_root:
                return None
            raise UserRefused(
                "user: nobody proved who submitted it, so it would run as root; submit through a controller with "
                "--local-users or with certificates, or start the agent with --allow-root"
            )
        entry = self._find(owner)
        if entry.pw_uid == 0 and not self.allows_root:
            raise UserRefused(
                f"user: {owner} is root here; submit as another user, or start the agent with --allow-root"
            )
        if entry.pw_uid == self.own_uid:
            return None
        if self.own_uid != 0:
            raise UserRefused(
                f"user: this agent cannot start processes of {entry.pw_name}, since it is not root; start it as root "
                "with --run-as owner, or with --run-as agent to run every job as the agent's user"
            )
        groups = tuple(self.list_groups(entry.pw_name, entry.pw_gid))
        return JobUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)

    def _find(self, owner: str) -> pwd.struct_passwd:
        mapped = self.users.get(owner)
        try:
            entry = self.find(owner if mapped is None else mapped)
        except (KeyError, ValueError):
            raise UserRefused(
                f"user: {owner if mapped is None else mapped} is no user of this machine; create it, or start the agent "
                f"with --map-user {owner}=USER"
            ) from None
        if mapped is None and 0 < entry.pw_uid < PEOPLE_UID_LEAST and entry.pw_uid != self.own_uid:
            raise UserRefused(
                f"user: {owner} is an account of the system (number {entry.pw_uid}); start the agent with --map-user "
                f"{owner}={owner} if it is meant"
            )
        return entry
