"""The steps that change a MIG layout, each one call to the device.

Owns their names and how they read to a person. Must not know when a step is
allowed nor how it is done.
"""

from dataclasses import dataclass

__all__ = ["CreateCompute", "CreateInstance", "DestroyCompute", "DestroyInstance", "SetMode", "Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetMode:
    """Asks for MIG mode."""

    enabled: bool

    def describe(self) -> str:
        """The step for a person."""
        return f"turn MIG mode {'on' if self.enabled else 'off'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyCompute:
    """Removes one compute instance."""

    instance_id: int
    compute_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"destroy compute instance {self.compute_id} of GPU instance {self.instance_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyInstance:
    """Removes one GPU instance, which has no compute instance by then."""

    instance_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"destroy GPU instance {self.instance_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateInstance:
    """Makes a GPU instance at exactly this place."""

    profile_id: int
    start: int

    def describe(self) -> str:
        """The step for a person."""
        return f"create GPU instance of profile {self.profile_id} at {self.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCompute:
    """Makes a compute instance in the GPU instance that begins at `start`: its id is the driver's to give."""

    start: int
    profile_id: int

    def describe(self) -> str:
        """The step for a person."""
        return f"create compute instance of profile {self.profile_id} in the GPU instance at {self.start}"


Step = SetMode | DestroyCompute | DestroyInstance | CreateInstance | CreateCompute
