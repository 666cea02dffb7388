"""Errors of the contract: somebody sent what the contract does not allow.

Every violation names the field by its path in the message and says what to do.
"""

from eelgrid_protos.values import dataclass

# Ends the headline of a message that breaks rules of the contract, which begins with the message's class.
CONTRACT_BROKEN = "breaks the contract"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule."""

    field: str
    problem: str
    remedy: str

    def under(self, prefix: str) -> "Violation":
        """The same violation, seen from the message that holds this one."""
        # An element of a list: nodes[0].name, not nodes.[0].name.
        joint = "." if self.field and not self.field.startswith("[") else ""
        path = f"{prefix}{joint}{self.field}"
        return Violation(path, self.problem, self.remedy)

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}" if self.field else f"{self.problem}; {self.remedy}"


class ContractError(ValueError):
    """A message that the contract does not allow: its sender is at fault, whoever that is."""

    def __init__(self, message: str, violations: tuple[Violation, ...]) -> None:
        self.message = message
        self.violations = violations
        super().__init__(f"{message}: " + "; ".join(map(str, violations)))


class MalformedMessage(ContractError):
    """Bytes that do not parse."""


class InvalidMessage(ContractError):
    """A field that breaks a rule."""
