"""Train in all processes that torchrun or srun started; the first one writes the model.

torchrun --nproc-per-node 2 torchrun_train.py model.onnx data.npz trained.onnx
"""

import sys

import numpy as np

from ortflex import Trainer


def train(model, data, output):
    arrays = np.load(data)
    trainer = Trainer(model, loss="squared_error", optimizer="adam", epochs=3, distributed="torch")
    trainer.fit(arrays["X"], arrays["y"], validation_data=0.2)
    if trainer.rank == 0:
        trainer.export(output)


if __name__ == "__main__":
    train(*sys.argv[1:])
