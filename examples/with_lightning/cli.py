"""The task by LightningCLI: what is trained and how stands in a file, or on the command line.

Run: python examples/with_lightning/cli.py fit --config examples/with_lightning/zero.yaml
     python examples/with_lightning/cli.py fit --config examples/with_lightning/zero.yaml --trainer.strategy.stage 3
"""

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

import lightning_distkit  # noqa: F401  # makes "powersgd", "zero_stage_2" and "pipe" names of strategies

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task
from lightning_task import LanguageModel, Sources


def main() -> None:
    task.use_loopback()
    LightningCLI(LanguageModel, Sources, seed_everything_default=0, save_config_callback=None)


if __name__ == "__main__":
    main()
