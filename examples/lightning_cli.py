"""LightningCLI: the whole run in a YAML file, the strategy and its budgets with it.

python examples/lightning_cli.py fit --config configs/lightning_cpu.yaml
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from train_lightning import ByteData, ByteModel


def main() -> None:
    LightningCLI(ByteModel, ByteData, seed_everything_default=0, save_config_callback=None)


if __name__ == "__main__":
    main()
