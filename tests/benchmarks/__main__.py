"""``python -m tests.benchmarks [TABLE] [options]``: one of the tables, or all."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads a BLAS

import sys

from tests.benchmarks import (
    classes,
    data,
    decoder,
    distributed,
    estimators,
    features,
    gpu,
    growth,
    layers,
    memory,
    peers_table,
    quantization,
)

TABLES = {
    "classes": classes.main,
    "peers": peers_table.main,
    "gpu": gpu.main,
    "growth": growth.main,
    "data": data.main,
    "decoder": decoder.main,
    "distributed": distributed.main,
    "estimators": estimators.main,
    "features": features.main,
    "layers": layers.main,
    "memory": memory.main,
    "quantization": quantization.main,
}


def main(arguments: list[str]) -> None:
    """Print the tables."""
    if arguments and arguments[0] in TABLES:
        TABLES[arguments[0]](arguments[1:])
        return
    for name, table in TABLES.items():
        if name not in ("gpu", "decoder"):  # for machines with one, and with 8 GB
            table(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
