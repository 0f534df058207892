"""The GPUs that a plan knows, with figures of their data sheets."""

from dataclasses import dataclass

GB, GIB = 1e9, 2.0**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, in a machine as such GPUs are usually sold or rented."""

    model: str
    """What the name that the driver reports contains."""
    title: str
    memory: float
    """Bytes."""
    half: float
    """FLOP/s of dense matrix products in bf16, or in fp16 where there is no bf16, with float32 sums."""
    single: float
    """FLOP/s in float32."""
    bandwidth: float
    """Bytes per second from and to its own memory."""
    link: float
    """Bytes per second of an all-reduce between GPUs of one machine: the bus bandwidth that nccl-tests reports."""
    link_name: str
    network: float
    """Bytes per second between two machines, all GPUs of a machine together."""
    has_bf16: bool = True


GPUS = {
    "2080ti": Gpu(
        "2080 Ti", "RTX 2080 Ti", 11 * GIB, 53.8e12, 13.4e12, 616 * GB, 6 * GB, "PCIe 3.0", 1.25 * GB, has_bf16=False
    ),
    "4090": Gpu(
        "4090", "RTX 4090", 24 * GIB, 165e12, 82.6e12, 1008 * GB, 12 * GB, "PCIe 4.0", 1.25 * GB
    ),
    "a100": Gpu("A100", "A100 SXM 80 GB", 80 * GIB, 312e12, 19.5e12, 2039 * GB, 230 * GB, "NVLink 3", 100 * GB),
    "h100": Gpu("H100", "H100 SXM 80 GB", 80 * GIB, 989e12, 67e12, 3350 * GB, 360 * GB, "NVLink 4", 400 * GB),
    "h200": Gpu("H200", "H200 SXM 141 GB", 139 * GIB, 989e12, 67e12, 4800 * GB, 360 * GB, "NVLink 4", 400 * GB),
}  # fmt: skip
"""By the name of `--gpu`. Memory as the driver reports it, rounded down."""
