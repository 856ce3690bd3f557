"""Source texts that the job scripts of several tests begin with."""

from __future__ import annotations

# A Lightning job on two ranks of the CPU: `fit(Lit(), rows, ...)`.
LIGHTNING = """
import lightning, torch

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def loader(rows):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(rows, 4)), 2)

def trainer(strategy="ddp", epochs=1, saves=False):
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
        enable_checkpointing=saves, enable_progress_bar=False, enable_model_summary=False,
    )
"""
