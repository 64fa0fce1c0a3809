"""GPUs that programs are compiled for without having one: what XLA is told about each."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddtree_jax.pallas.backend import B200, H200, RTX_PRO_6000, Platform


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU by its description.

    Attributes:
      name: key of TARGETS.
      platform: as the kernels see it.
      device_kind: Pallas looks the GPU up by this name, so it must be one that JAX knows.
      capability: compute capability.
      sm: the target string in a binary for it.
      memory, bandwidth, l2, clock_ghz: bytes, bytes a second, bytes, GHz; they steer heuristics of XLA.
    """

    name: str
    platform: Platform
    device_kind: str
    capability: tuple[int, int]
    sm: str
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float

    def description(self) -> str:
        """A GpuTargetConfigProto of XLA, as text."""
        major, minor = self.capability
        # Without it XLA compiles for plain sm_120, which lacks the FP4 instructions; the others get the `a` unasked.
        feature = "feature_extension: ACCELERATED_FEATURES" if major == 12 else ""
        per_core = {9: 233472, 10: 233472, 12: 102400}[major]
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {1536 if major == 12 else 2048}
  shared_memory_per_block: 49152 shared_memory_per_core: {per_core}
  shared_memory_per_block_optin: {self.platform.shared_memory}
  core_count: {self.platform.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  driver_version: "13.0.0" runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 }}
device_description_str: "{self.device_kind}"
"""

    def topology(self) -> Any:
        """One device of this kind. RuntimeError from JAX where the CUDA plugin is missing."""
        from jax.experimental import topologies

        return topologies.get_topology_desc(platform="cuda", target_config=self.description(), topology="1x1x1")


TARGETS = {
    target.name: target
    for target in (
        Target("h200", H200, "NVIDIA H200", (9, 0), "sm_90a", 150 * 10**9, 4_800 * 10**9, 52_428_800, 1.98),
        Target("b200", B200, "NVIDIA B200", (10, 0), "sm_100a", 190 * 10**9, 7_700 * 10**9, 132_000_000, 1.96),
        Target(
            "rtx_pro_6000",
            RTX_PRO_6000,
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            (12, 0),
            "sm_120a",
            102 * 10**9,
            1_790 * 10**9,
            134_000_000,
            2.6,
        ),
    )
}
