"""Optimizer state, then gradients, then parameters sharded over the ranks: the three stages of ZeRO.

Source: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
https://arxiv.org/abs/1910.02054.
"""

from lightning_distkit.core.zero.checkpoint_folder import is_sharded_checkpoint as is_sharded_checkpoint
from lightning_distkit.core.zero.checkpoint_folder import read_sharded_checkpoint as read_sharded_checkpoint
from lightning_distkit.core.zero.clipping import clip_grad_norm_ as clip_grad_norm_
from lightning_distkit.core.zero.clipping import clip_grad_value_ as clip_grad_value_
from lightning_distkit.core.zero.convert import convert_sharded_checkpoint as convert_sharded_checkpoint
from lightning_distkit.core.zero.dtensor_optimizer import DTensorOptimizer as DTensorOptimizer
from lightning_distkit.core.zero.estimate import MemoryEstimate as MemoryEstimate
from lightning_distkit.core.zero.estimate import estimate_memory as estimate_memory
from lightning_distkit.core.zero.grad_scaler import GradScaler as GradScaler
from lightning_distkit.core.zero.gradients import shard_gradients as shard_gradients
from lightning_distkit.core.zero.initialise import check_initialisable as check_initialisable
from lightning_distkit.core.zero.initialise import initialise as initialise
from lightning_distkit.core.zero.local_shards import ShardedCopy as ShardedCopy
from lightning_distkit.core.zero.local_shards import local_shards as local_shards
from lightning_distkit.core.zero.local_shards import without_weights as without_weights
from lightning_distkit.core.zero.module_state import load_module_full_state_dict as load_module_full_state_dict
from lightning_distkit.core.zero.module_state import module_full_state_dict as module_full_state_dict
from lightning_distkit.core.zero.module_state import module_sharded_state_dict as module_sharded_state_dict
from lightning_distkit.core.zero.optimizer import ZeroOptimizer as ZeroOptimizer
from lightning_distkit.core.zero.parameters import shard_parameters as shard_parameters
from lightning_distkit.core.zero.parameters import unshard_parameters as unshard_parameters
from lightning_distkit.core.zero.policy import find_blocks as find_blocks
from lightning_distkit.core.zero.replicas import sync_buffers as sync_buffers
from lightning_distkit.core.zero.replicas import sync_module_states as sync_module_states
from lightning_distkit.core.zero.saved_tensor import SavedTensor as SavedTensor
from lightning_distkit.core.zero.shardable import ELEMENTWISE as ELEMENTWISE
from lightning_distkit.core.zero.sharded_checkpoint import ShardedCheckpointWriter as ShardedCheckpointWriter
from lightning_distkit.core.zero.sharding import sharding_of as sharding_of
