"""What compression saves, costs and leaves out, logged while training goes on."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_distkit.callbacks.compression_figure import Layer, compression_figure, need_matplotlib
from lightning_distkit.callbacks.folder import folder_of
from lightning_distkit.core.compression import CommState
from lightning_distkit.core.compression.measurement import LayerMeasurement
from lightning_distkit.core.compression.statistics import Statistics


class CompressionStatsLogger(Callback):
    """Log to every logger of the Trainer, at every so many steps:

    ===============================  ================================================================================
    ``compression/rate``             bytes that plain all-reduces would have sent, over those that were sent
    ``compression/nbytes``           bytes that this rank sent, per step
    ``compression/total_nbytes``     bytes that this rank sent in this fit
    ``compression/relative_error``   of all that the ranks were to send in this step, the part that the messages do not
                                     stand for: 0 for the plain mean, 1 if nothing is sent; Frobenius norms
    ``compression/error_norm``       norm of what is remembered for the next step, over all ranks and layers
    ``compression/computing_ms``     milliseconds per step spent making messages and reading them
    ``compression/waiting_ms``       milliseconds per step spent waiting for the network and the other ranks
    ===============================  ================================================================================

    Numbers per step are means since the last time; bytes and times are those of rank 0. On CUDA the times are those of
    launching. At other steps nothing is done; at a logged one each compressed layer is copied and multiplied twice
    more, and there is one small message.

    Args:
        every_n_steps: optimizer steps between two logs.
        per_layer: also log ``compression/relative_error/<parameter>`` of each compressed parameter.
        figure: at the end of fit, draw rate and error over time and what each layer costs and saves:
            ``compression.png`` beside the checkpoints, and "compression" in TensorBoard. Needs matplotlib.
        prog_bar: show rate and relative error in the progress bar, too.

    Raises:
        ValueError: ``every_n_steps`` is not a whole number of at least 1.
        ModuleNotFoundError: ``figure`` without matplotlib.
        MisconfigurationException: at the start of fit, the strategy has no hook of ours.
    """

    def __init__(
        self, every_n_steps: int = 50, per_layer: bool = False, figure: bool = True, prog_bar: bool = False
    ) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}; 50 is usual")
        for name, value in (("per_layer", per_layer), ("figure", figure), ("prog_bar", prog_bar)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if figure:
            need_matplotlib()
        self.every_n_steps = every_n_steps
        self.per_layer = per_layer
        self.figure = figure
        self.prog_bar = prog_bar
        self.history: list[dict[str, float]] = []  # what was logged, with "step"; the same on every rank but for times
        self.layers: dict[str, LayerMeasurement] = {}  # of the last logged step; the same on every rank
        self._statistics: Statistics | None = None
        self._step = 0  # optimizer steps that are done
        self._increment = 1  # of them in the last batch: several where there are several optimizers

    @property
    def state_key(self) -> str:
        return self._generate_state_key(every_n_steps=self.every_n_steps, per_layer=self.per_layer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.history, self.layers = [], {}  # of an earlier fit; a checkpoint's comes later

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = _state(trainer)
        self._statistics = Statistics(state)
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step + self._increment) // self.every_n_steps > trainer.global_step // self.every_n_steps:
            _state(trainer).measure()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # accumulating
            return
        if trainer.global_step // self.every_n_steps > self._step // self.every_n_steps:
            self._log(trainer, pl_module)
        self._increment = trainer.global_step - self._step
        self._step = trainer.global_step

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._statistics is not None
        names: dict[Tensor, str] = {parameter: name for name, parameter in pl_module.named_parameters()}
        metrics = self._statistics.collect(names, self.per_layer)
        self.layers = self._statistics.layers
        self.history.append({"step": trainer.global_step, **metrics})
        named = {f"compression/{name}": value for name, value in metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
        if self.prog_bar:
            for name in ("compression/rate", "compression/relative_error"):
                if name in named:
                    pl_module.log(name, named[name], prog_bar=True, logger=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.figure or not self.history or getattr(trainer, "fast_dev_run", False):
            return
        path = folder_of(trainer) / "compression.png"
        if not trainer.is_global_zero:
            return
        layers = [
            Layer(name, each.nbytes_whole, each.nbytes_sent, each.relative_error) for name, each in self.layers.items()
        ]
        figure = compression_figure(self.history, layers)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        rank_zero_info(f"Compression over time and layer by layer: {path}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("compression", figure, global_step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])


def _state(trainer: Trainer) -> CommState:
    state = getattr(trainer.strategy, "comm_state", None)
    if not isinstance(state, CommState):
        raise MisconfigurationException(
            'CompressionStatsLogger sees what the hooks of lightning_distkit do, by Trainer(strategy="powersgd") or '
            f"CommHookDDPStrategy(hook=name); got {type(trainer.strategy).__name__}"
            + ("" if state is None else f" with the state {type(state).__name__}")
        )
    return state
