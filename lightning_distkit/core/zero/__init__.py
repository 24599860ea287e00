"""Optimizer state, then gradients, then parameters sharded over the ranks: the three stages of ZeRO.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054.
"""

from lightning_distkit.core.zero.estimate import MemoryEstimate as MemoryEstimate
from lightning_distkit.core.zero.estimate import estimate_memory as estimate_memory
from lightning_distkit.core.zero.grad_scaler import GradScaler as GradScaler
from lightning_distkit.core.zero.gradients import shard_gradients as shard_gradients
from lightning_distkit.core.zero.optimizer import ELEMENTWISE as ELEMENTWISE
from lightning_distkit.core.zero.optimizer import ZeroOptimizer as ZeroOptimizer
from lightning_distkit.core.zero.replicas import sync_buffers as sync_buffers
from lightning_distkit.core.zero.replicas import sync_module_states as sync_module_states
