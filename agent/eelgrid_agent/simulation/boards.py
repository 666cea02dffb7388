"""Which boards simulated devices are: the PCI ids that real ones of the catalogue's products have.

Files of other tools tell devices apart by PCI id, so a simulated node needs
them as well. Read from NVIDIA's list of supported products; a product that no
real board has is not here.
"""

from collections.abc import Mapping

__all__ = ["DEVICE_IDS"]

# PCI device ids by catalogue key; the vendor is always NVIDIA, 0x10DE.
DEVICE_IDS: Mapping[str, int] = {
    "t4": 0x1EB8,
    "p100-pcie-16gb": 0x15F8,
    "a10": 0x2236,
    "a10g": 0x2237,
    "a30": 0x20B7,
    "a40": 0x2235,
    "a100-sxm4-40gb": 0x20B0,
    "a100-pcie-40gb": 0x20F1,
    "a100-sxm4-80gb": 0x20B2,
    "a100-pcie-80gb": 0x20B5,
    "l4": 0x27B8,
    "l40": 0x26B5,
    "l40s": 0x26B9,
    "h100-pcie-80gb": 0x2331,
    "h100-sxm5-80gb": 0x2330,
    "h100-nvl-94gb": 0x2321,
    "h200-sxm-141gb": 0x2335,
    "h200-nvl-141gb": 0x233B,
    "gh200-96gb": 0x2342,
    "gh200-144gb": 0x2348,
    "b200": 0x2901,
    "b300": 0x3182,
    "gb200": 0x2941,
    "gb300": 0x31C2,
    "rtx-pro-6000-blackwell-max-q": 0x2BB4,
    "rtx-pro-6000-blackwell-server": 0x2BB5,
}
