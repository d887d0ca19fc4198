"""What data sheets say of devices: the only figures in a plan that nobody here can check.

Operations are dense (a data sheet's figure "with sparsity" is twice that), links count one
direction (half of what is usually advertised), and bytes are powers of ten.
"""

from dataclasses import dataclass
from typing import Literal

Name = Literal["h200", "h100", "a100-80", "a100-40", "l40s", "4090", "cpu"]


@dataclass(frozen=True)
class Device:
    """One GPU as it is sold."""

    name: str
    source: str
    bf16: float  # operations per second, accumulated in float32
    fp32: float  # the same without tensor cores, which is torch's default
    memory: float  # bytes
    link: float  # bytes per second to the others of its machine
    network: float = 0.0  # bytes per second to other machines; 0: its maker sells no such machine


H100 = "NVIDIA H100 Tensor Core GPU Architecture (white paper, SXM5); DGX H100 data sheet"
H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM); DGX H200 data sheet"
A100 = "NVIDIA A100 Tensor Core GPU data sheet (SXM); DGX A100 data sheet"

DEVICES: dict[Name, Device | None] = {
    "h200": Device("H200 SXM", H200, 989.5e12, 67e12, 141e9, 450e9, 50e9),
    "h100": Device("H100 SXM5", H100, 989.4e12, 66.9e12, 80e9, 450e9, 50e9),
    "a100-80": Device("A100 SXM 80GB", A100, 312e12, 19.5e12, 80e9, 300e9, 25e9),
    "a100-40": Device("A100 SXM 40GB", A100, 312e12, 19.5e12, 40e9, 300e9, 25e9),
    "l40s": Device("L40S", "NVIDIA L40S data sheet", 362.05e12, 91.6e12, 48e9, 32e9),
    "4090": Device(
        "GeForce RTX 4090",
        "NVIDIA Ada GPU Architecture (white paper); PCI Express 4.0 x16",
        165.2e12,
        82.6e12,
        24e9,
        32e9,
    ),
    "cpu": None,  # no data sheet says what a network gets from one
}
