"""Train in workers of Ray Train.

python ray_train.py model.onnx data.npz trained.onnx
"""

import os
import sys

import numpy as np
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ortflex import Trainer


def train(config):
    arrays = np.load(config["data"])
    trainer = Trainer(
        config["model"], loss="squared_error", optimizer="adam", epochs=3, distributed="torch"
    )
    trainer.fit(arrays["X"], arrays["y"], validation_data=0.2)
    if trainer.rank == 0:
        trainer.export(config["output"])


if __name__ == "__main__":
    # Workers have their own folders, so paths are absolute; several machines need a shared disk.
    model, data, output = map(os.path.abspath, sys.argv[1:])
    TorchTrainer(
        train,
        train_loop_config={"model": model, "data": data, "output": output},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
