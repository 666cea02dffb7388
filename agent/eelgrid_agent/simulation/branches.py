"""What a driver's branch knows of a part's MIG profiles: how far it numbers them, and what it calls them.

An older driver lacks the profiles that came after it, and asked for one by a
newer binding's number it says that there is no such argument. Names are the
driver's too: the very same profile was printed otherwise before.

Source: the headers of the binding's releases from 450 to 615 for the numbers;
listings in public issues for the names (mig-parted#227, gpu-operator#1303);
in which branch those changed was not seen and is taken.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

from eelgrid_protos.catalogue import MigGeometry

__all__ = ["geometry_of", "profiles_end"]

# First branch, and one past the last number of a GPU instance profile.
_ENDS = ((0, 6), (470, 8), (525, 10), (570, 13), (575, 17), (615, 18))
# Drivers print names from here on; before, whoever shows one has it from elsewhere.
_NAMED_SINCE = 510
# Part: the branch that brought today's names, and those before it.
_RENAMED: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "gb200-186gb": (
        580,
        {"1g": "1g.24gb", "1g+me": "1g.24gb+me", "3g": "3g.95gb", "4g": "4g.95gb", "7g": "7g.189gb"},
    ),
}


def profiles_end(branch: int) -> int:
    """One past the highest number that a driver of this branch takes for a GPU instance profile."""
    return _ENDS[bisect_right(_ENDS, branch, key=lambda row: row[0]) - 1][1]


def geometry_of(geometry: MigGeometry, branch: int) -> MigGeometry:
    """A part's geometry as a driver of this branch has it; the very same where it lacks and renames nothing."""
    end = profiles_end(branch)
    until, before = _RENAMED.get(geometry.key, (0, {}))
    names = before if _NAMED_SINCE <= branch < until else {}
    profiles = {
        key: replace(profile, name=names[key]) if key in names else profile
        for key, profile in geometry.profiles.items()
        if profile.enum < end
    }
    return geometry if profiles == geometry.profiles else replace(geometry, profiles=profiles)
