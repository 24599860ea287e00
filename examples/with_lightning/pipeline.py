"""The task with its layers on two processes, one stage each: `baseline.py` with the marked lines changed.

Run: python examples/with_lightning/pipeline.py
"""

import sys
from pathlib import Path

import lightning.pytorch as pl

from lightning_distkit import PipeStrategy  # <-- changed
from lightning_distkit.callbacks import PipelineTimeline  # <-- changed

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task
from lightning_task import LanguageModel, Sources


def main() -> None:
    task.use_loopback()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipeStrategy(chunks=4, schedule="1f1b"),  # <-- changed; strategy="pipe" has 8 chunks and gpipe
        callbacks=[PipelineTimeline(every_n_steps=task.STEPS // 4)],  # <-- changed: pipeline.png, and a trace
        max_epochs=1,
        max_steps=task.STEPS,
        gradient_clip_val=1.0,
        val_check_interval=task.STEPS // 4,
        check_val_every_n_epoch=None,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), Sources())
    trainer.print(f"validation loss {trainer.callback_metrics['validation_loss']:.3f}")


if __name__ == "__main__":
    main()
