"""`task.py` for Lightning: the model and the data, with nothing in them of how many processes there are."""

import lightning.pytorch as pl
import task
from torch import Tensor
from torch.utils.data import DataLoader


class LanguageModel(pl.LightningModule):
    """Learns to predict the next byte; logs "train_loss" and "validation_loss", in nats a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.GPT()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = task.loss_of(self.model, batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation_loss", task.loss_of(self.model, batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer, schedule = task.make_optimizer(self, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sources(pl.LightningDataModule):
    """The standard library's own sources, in rows of bytes."""

    def setup(self, stage: str) -> None:
        self.train, self.validation = task.read_rows()  # tensors of rows: a DataLoader takes them as they are

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, task.BATCH, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, 4 * task.BATCH)
