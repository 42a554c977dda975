"""Train in processes that Spark starts.

spark-submit spark_train.py model.onnx data.npz trained.onnx
"""

import os
import sys

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def train(model, data, output):
    import numpy as np

    from ortflex import Trainer

    arrays = np.load(data)
    trainer = Trainer(model, loss="squared_error", optimizer="adam", epochs=3, distributed="torch")
    trainer.fit(arrays["X"], arrays["y"], validation_data=0.2)
    if trainer.rank == 0:
        trainer.export(output)


if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    # local_mode=True: on the driver's machine; False: on the machines of the cluster, with a shared disk.
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    distributor.run(train, *map(os.path.abspath, sys.argv[1:]))
    spark.stop()
