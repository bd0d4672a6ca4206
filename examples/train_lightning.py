"""An ordinary Lightning script. Which strategy it runs under is one word on its command line.

python examples/train_lightning.py                          # everything on the device
TIEROFFLOAD_CONFIG='{"device_budget": "12MiB"}' python examples/train_lightning.py --strategy tieroffload
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from real_text import byte_windows
from tiny_gpt import TinyGPT
from torch.utils.data import DataLoader


class ByteModel(pl.LightningModule):
    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = TinyGPT()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByteData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4, num_windows: int = 64, num_tokens: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.windows = byte_windows(num_windows, num_tokens)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.windows[:-8], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.windows[-8:], batch_size=self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2)
    options = parser.parse_args()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=options.strategy,
        precision=options.precision,
        devices=1,
        max_steps=options.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model, data = ByteModel(), ByteData()
    trainer.fit(model, data)
    loss = float(trainer.callback_metrics["loss"])
    (metrics,) = trainer.validate(model, data, verbose=False)
    print(f"loss {loss:.9f}  val_loss {metrics['val_loss']:.9f}")


if __name__ == "__main__":
    main()
