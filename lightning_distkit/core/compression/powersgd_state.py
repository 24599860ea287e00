"""What PowerSGD is told and what it remembers.

Source: Vogels et al., 2019, https://arxiv.org/abs/1905.13727; arguments, defaults and log lines are those of
``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``. Unlike there, what is remembered belongs to
parameters, not to buckets: DDP may rebuild its buckets, or a resumed run have others, and nothing is mixed up.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket

from lightning_distkit.core.compression import matrix_rank
from lightning_distkit.core.compression.error_memory import ErrorMemory
from lightning_distkit.core.compression.factor_memory import FactorMemory
from lightning_distkit.core.compression.hook import CommState
from lightning_distkit.core.compression.low_rank import memory_order
from lightning_distkit.core.compression.matrix_rank import MatrixRank
from lightning_distkit.core.compression.mersenne import SeedSequence
from lightning_distkit.core.compression.remainder import Remainder

logger = logging.getLogger(__name__)

_ARGUMENTS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
    "wire_dtype",
)
_WIRE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16} | {
    name: dtype for dtype in (torch.bfloat16, torch.float16) for name in (dtype, str(dtype), str(dtype).split(".")[1])
}
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class PowerSGDState(CommState):
    """Hyperparameters and memory of `powerSGD_hook`, `batched_powerSGD_hook` and `acp_sgd_hook`; one for each model.

    Args:
        process_group: the processes whose gradients are averaged; None for all.
        matrix_approximation_rank: columns ``r`` of the two factors. Start with 1 and double it until the quality
            suffices; 1 to 4 is usual, up to 32 for language models. A mapping of iterations to numbers is a schedule,
            ``{0: 1, 2000: 4}``; a mapping of patterns of parameter names to numbers or schedules says it for each
            parameter, first match, 0 for one that is to travel whole: ``{"*embed*": 0, "*": 4}``. May be set at any
            time, on every rank in the same iteration; what the factors have learned is kept.
        start_powerSGD_iter: iterations (synchronised backwards) of plain all-reduce before compression starts. Begin
            with 10 % of all steps, and not less than the learning rate's warm-up.
        min_compression_rate: an (n, m) gradient is compressed where ``(n + m) * r * min_compression_rate < n * m``;
            the others, vectors among them, travel whole.
        use_error_feedback: add what compression left out to the next gradient. Costs one copy of the compressed
            gradients, in single precision or better.
        warm_start: start from the last step's factor; otherwise from a new random one at every step.
        orthogonalization_epsilon: added to the norm that a factor's column is divided by. 0 is exact, and safe here.
        random_seed: of the first factors; the same on every rank.
        compression_stats_logging_frequency: iterations between two log lines of `compression_stats`.
        batch_tensors_with_same_shape: multiply matrices of one shape in one batched product, where they lie at equal
            distances in memory; nothing is copied for it.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16`` (or "bf16", "fp16") to send the factors so, and feed back
            what the rounding took with the rest of the error; None for the gradients' own type. Tensors that are not
            compressed keep theirs, and travel in a collective of their own.

    Raises:
        ValueError: an argument is out of range, or compression with error feedback or warm start is to begin before
            iteration 2, in which DDP rebuilds its buckets.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: MatrixRank = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        wire_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(process_group)
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise TypeError(f"process_group must be a process group, or None for all, got {process_group!r}")
        matrix_rank.check(matrix_approximation_rank)
        _at_least(0, "start_powerSGD_iter", start_powerSGD_iter, "10 % of all steps is a good begin")
        _at_least(0, "compression_stats_logging_frequency", compression_stats_logging_frequency, "10_000 is usual")
        _at_least(0, "random_seed", random_seed, "any number will do, the same on every rank")
        if not _is_number(min_compression_rate) or not min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be a number above 0, got {min_compression_rate!r}; 2 is usual")
        if not _is_number(orthogonalization_epsilon) or not 0 <= orthogonalization_epsilon < float("inf"):
            raise ValueError(
                f"orthogonalization_epsilon must be a number of at least 0, got {orthogonalization_epsilon!r}; use 0"
            )
        for name, value in (
            ("use_error_feedback", use_error_feedback),
            ("warm_start", warm_start),
            ("batch_tensors_with_same_shape", batch_tensors_with_same_shape),
        ):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if not isinstance(wire_dtype, torch.dtype | str | None) or wire_dtype not in _WIRE_DTYPES:
            raise ValueError(f'wire_dtype must be "bf16", "fp16" or None, got {wire_dtype!r}; None sends all bits')
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise ValueError(
                f"start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, as DDP rebuilds its "
                f"buckets in iteration 1; got {start_powerSGD_iter}"
            )
        logger.info(
            "PowerSGD config: matrix_approximation_rank = %s; start_powerSGD_iter = %s; "
            "min_compression_rate = %s; orthogonalization_epsilon = %s; use_error_feedback = %s; warm_start = %s; "
            "random_seed = %s; compression_stats_logging_frequency = %s; batch_tensors_with_same_shape = %s; "
            "wire_dtype = %s",
            matrix_approximation_rank,
            start_powerSGD_iter,
            min_compression_rate,
            orthogonalization_epsilon,
            use_error_feedback,
            warm_start,
            random_seed,
            compression_stats_logging_frequency,
            batch_tensors_with_same_shape,
            wire_dtype,
        )
        self._matrix_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape

        self.wire_dtype = _WIRE_DTYPES[wire_dtype]

        self.errors = ErrorMemory()  # of this rank alone; all that follows is the same on every rank
        self.factors = FactorMemory(
            SeedSequence(random_seed), warm_start, batch_tensors_with_same_shape, orthogonalization_epsilon
        )
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._rank_was_changed = False
        self._gradient_scale = 1.0
        self._positions: dict[Tensor, int] = {}  # of all parameters, in the module's order, once seen
        self._module: weakref.ref[nn.Module] | None = None
        self._names: dict[Tensor, str] = {}
        self._places: dict[Tensor, int] = {}
        self._seen: list[list[Tensor]] = []
        self._orphans: dict[str, Any] = {}  # a loaded state whose parameters have not been seen yet

    def claim(self, module: nn.Module) -> None:
        """Be registered with a model: again with the same one, but not with two."""
        other = self._module() if self._module is not None else None
        if other is not None and other is not module:
            raise RuntimeError(
                f"this PowerSGDState is registered with another model, {type(other).__name__}; make one for each model"
            )
        self._module = weakref.ref(module)
        self._positions, self._seen = {}, []  # since the last time a layer may have been unfrozen
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._places = {parameter: i for i, parameter in enumerate(self._names)}
        matrix_rank.check(self._matrix_rank, self._names.values())

    def agreement(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _ARGUMENTS}, "iter": self.iter}

    # What is asked of it

    def compression_stats(self) -> tuple[float, int, int]:
        """The rate, and the numbers of elements before and after compression, since compression started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    @property
    def error_dict(self) -> dict[Tensor, Tensor]:
        """What was left out of each parameter's gradient so far, of this rank alone; copies.

        (n, m) each; the batched hook's are flat, and the last one of a bucket has its padding.
        """
        return {parameter: error.value() for parameter, error in self.errors.all().items()}

    @property
    def p_memory_dict(self) -> dict[Tensor, Tensor]:
        """The factor P that each parameter starts from, (r, n), the same on every rank; of `acp_sgd_hook` only."""
        return self.factors.p

    @property
    def q_memory_dict(self) -> dict[Tensor, Tensor]:
        """The factor Q that each parameter starts from, (r, m), the same on every rank."""
        return self.factors.q

    # What may be changed at any time, on every rank in the same iteration

    @property
    def matrix_approximation_rank(self) -> MatrixRank:
        return self._matrix_rank

    @matrix_approximation_rank.setter
    def matrix_approximation_rank(self, rank: MatrixRank) -> None:
        matrix_rank.check(rank, self._names.values())
        self._matrix_rank = rank
        self._rank_was_changed = True

    @property
    def gradient_scale(self) -> float:
        """What the loss was multiplied by before backward; set it where a ``GradScaler`` changes the scale.

        The errors are remembered in the gradients' units, so they are rescaled with it.
        """
        return self._gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, scale: float) -> None:
        if not _is_number(scale) or not 0 < scale < float("inf"):
            raise ValueError(f"gradient_scale must be a finite number above 0, got {scale!r}; 1 is without a scaler")
        if scale != self._gradient_scale:
            self.errors.scale_(scale / self._gradient_scale)
            self._gradient_scale = scale

    # What the hooks do with it

    @property
    def is_compressing(self) -> bool:
        """Whether the warm-up with plain all-reduce is over."""
        return self.iter >= self.start_powerSGD_iter

    def rank_of(self, parameter: Tensor) -> int:
        """`matrix_approximation_rank` of this parameter now; 0 if it is to travel whole."""
        return matrix_rank.matrix_rank(self._matrix_rank, self._names.get(parameter), self.iter)

    def rank_of_bucket(self) -> int:
        """`matrix_approximation_rank` of a whole bucket now; 0 if it is to travel whole."""
        if matrix_rank.is_by_name(self._matrix_rank):
            raise ValueError(
                f"the batched hook takes a number or a schedule as matrix_approximation_rank, as it compresses whole "
                f"buckets; got {self._matrix_rank!r}"
            )
        return matrix_rank.matrix_rank(self._matrix_rank, None, self.iter)

    def position_of(self, parameter: Tensor) -> int:
        """Its place in the module, or as long as that is not known, in the first iteration, 0."""
        return (self._places or self._positions).get(parameter, 0)

    def should_compress(self, n: int, m: int, r: int) -> bool:
        return (n + m) * r * self.min_compression_rate < n * m

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the iteration, if this is its last bucket."""
        if not bucket.is_last():
            return
        self.iter += 1
        self.factors.end_of_step()
        if self.iter == self.start_powerSGD_iter:
            logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def count(self, bucket: GradBucket, before: int, after: int) -> None:
        """Count the elements of one bucket, and log at the last one every so many iterations."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, total_before, total_after = self.compression_stats()
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                self.iter,
                total_before,
                total_after,
                rate,
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    # Saving and loading

    def observe(self, bucket: GradBucket) -> bool:
        if not self._positions:
            if bucket.index() == 0:
                self._seen = []
            self._seen.append(bucket.parameters())
            if bucket.is_last():
                # DDP makes its first buckets of the module's parameters in order, and hands out the last one first.
                in_order = [parameter for parameters in reversed(self._seen) for parameter in parameters]
                self._positions = {parameter: i for i, parameter in enumerate(in_order)}
                self._seen = []
                if self._orphans:
                    orphans, self._orphans = self._orphans, {}
                    self._adopt(orphans, dict(enumerate(self._positions)))
        return not self._orphans

    def state_dict(self, names: Mapping[Tensor, str] | None = None) -> dict[str, Any]:
        """All that training needs to continue: ``shared``, the same on every rank, and ``error``, of this rank alone.

        Args:
            names: names of the parameters, by which to save; by default it is their number in the module's order.

        Returns:
            Numbers, strings and tensors only, so that ``torch.load(weights_only=True)`` reads it. The tensors are not
            copies.
        """
        if self._orphans:
            return self._orphans
        key: Mapping[Tensor, str | int]
        key = names if names is not None else self._positions
        errors = self.errors.all()
        nameless = [tuple(parameter.shape) for parameter in errors if parameter not in key]
        if nameless:
            raise ValueError(
                f"parameters of shape {', '.join(map(str, nameless))} are compressed, but have no name: "
                + ("give the names of all" if names is not None else "a state is for one model; make one for each")
            )
        return {
            "shared": {
                **{name: getattr(self, name) for name in _COUNTERS},
                **self.factors.state_dict(key),
                "n_parameters": len(self._positions),
                "memory_order": {key[parameter]: memory_order(parameter) for parameter in errors},
                "gradient_scale": self._gradient_scale,
                "changed_rank": self._matrix_rank if self._rank_was_changed else None,
                # As they are, not subtracted from the errors: the last bit must not depend on whether one saves.
                "factors": {key[parameter]: (error.p, error.q) for parameter, error in errors.items()},
            },
            "error": {key[parameter]: error.whole for parameter, error in errors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[Tensor, str] | None = None) -> None:
        """Continue from what `state_dict` returned, with the same names if it was called with names.

        Raises:
            ValueError: it was saved with names and is loaded without, or the other way round, or for another model.
        """
        if not isinstance(state, Mapping) or not {"shared", "error"} <= state.keys() or "p" not in state["shared"]:
            raise ValueError(f"this is not what state_dict() returned: {state!r:.100}")
        shared = state["shared"]
        keys = (*shared["p"], *shared["q"], *state["error"])
        named = any(isinstance(key, str) for key in keys)
        numbered = any(isinstance(key, int) for key in keys)
        if (named and names is None) or (numbered and names is not None):
            raise ValueError(
                f"this state was saved {'with' if named else 'without'} the parameters' names and must be loaded "
                f"{'with' if named else 'without'} them; got names={'a mapping' if names else names}"
            )
        for name in _COUNTERS:
            setattr(self, name, shared[name])
        if shared["changed_rank"] is not None:
            self.matrix_approximation_rank = shared["changed_rank"]
        self._gradient_scale = shared["gradient_scale"]
        self.errors = ErrorMemory()
        if names is not None:
            self._adopt(state, {name: parameter for parameter, name in names.items()})
        elif self._positions:
            self._adopt(state, dict(enumerate(self._positions)))
        else:
            self._orphans = dict(state)

    def _adopt(self, state: Mapping[str, Any], parameters: Mapping[Any, Tensor]) -> None:
        """Give each loaded tensor to its parameter."""
        n_saved = state["shared"]["n_parameters"]
        if n_saved and self._positions and n_saved != len(self._positions):
            raise ValueError(
                f"the loaded compression state is of a model with {n_saved} trainable parameters, this one has "
                f"{len(self._positions)}; load the checkpoint of this model"
            )

        keys = {*state["shared"]["p"], *state["shared"]["q"], *state["error"]}
        if strangers := [key for key in keys if key not in parameters]:
            raise ValueError(f"the loaded compression state has the parameters {strangers}, the model has not")
        self.factors.load_state_dict(state["shared"], parameters)
        for key, error in state["error"].items():
            parameter = parameters[key]
            # A flat one is the batched hook's, with the padding of its square.
            if error.numel() != parameter.numel() and (error.dim() > 1 or error.numel() < parameter.numel()):
                raise ValueError(
                    f"the loaded error of the parameter {key!r} has shape {tuple(error.shape)}, the parameter "
                    f"{tuple(parameter.shape)}; load the checkpoint of this model"
                )
            if state["shared"]["memory_order"][key] != memory_order(parameter):
                raise ValueError(
                    f"the loaded error of the parameter {key!r} is of another memory format than the parameter: the "
                    f"order of its dimensions in memory was {state['shared']['memory_order'][key]} and is "
                    f"{memory_order(parameter)}; load before or after .to(memory_format=...), as it was saved"
                )
            factors = state["shared"]["factors"].get(key, (None, None))
            self.errors.restore(parameter, Remainder(error, *factors).to(parameter.device))
        if self._gradient_scale != state["shared"]["gradient_scale"]:  # set since it was loaded
            self.errors.scale_(self._gradient_scale / state["shared"]["gradient_scale"])

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        return {"arguments": {name: getattr(self, name) for name in _ARGUMENTS}, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). "
            "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.__init__(None, **saved["arguments"])  # type: ignore[misc]
        self.load_state_dict(saved["state"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(least: int, name: str, value: object, advice: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}; {advice}")
