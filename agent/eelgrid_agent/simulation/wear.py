"""What goes wrong inside a device over time: error counters, remapped rows, and what the driver advises.

Tests and faults count here; sensors read it. It knows no product: what a part
does not show is the sensors' business.
"""

from dataclasses import dataclass

__all__ = ["Wear"]


@dataclass(slots=True, kw_only=True)
class Wear:
    """One device's counters; `recovery_action` is NVML's number, 0 for none."""

    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    ecc_corrected_before: int = 0
    ecc_uncorrected_before: int = 0
    remapped_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    recovery_action: int = 0
    pcie_replays: int = 0
    nvlink_errors: int = 0

    @property
    def ecc_corrected_ever(self) -> int:
        """Over the life of the part."""
        return self.ecc_corrected_before + self.ecc_corrected

    @property
    def ecc_uncorrected_ever(self) -> int:
        """Over the life of the part."""
        return self.ecc_uncorrected_before + self.ecc_uncorrected

    def start_anew(self) -> None:
        """A reset or a new driver: volatile counters go to zero, pending rows are remapped, advice is taken."""
        self.ecc_corrected_before, self.ecc_corrected = self.ecc_corrected_ever, 0
        self.ecc_uncorrected_before, self.ecc_uncorrected = self.ecc_uncorrected_ever, 0
        self.pcie_replays = self.nvlink_errors = self.recovery_action = 0
        if self.remap_pending:
            self.remap_pending = False
            self.remapped_uncorrectable += 1
