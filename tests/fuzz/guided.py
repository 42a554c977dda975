"""Mutants of models guided by the lines of Python that they reach, by atheris (pip install atheris).

By hand: ``python -m tests.fuzz.guided folder -runs=100000``; the folder keeps what reached new lines, and
whatever fails is written as ``crash-…`` into the current one. Options are libFuzzer's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris  # type: ignore[import-not-found,unused-ignore]

with atheris.instrument_imports(include=["ortflex_core"]):
    from ortflex_core import Model, OrtflexError
    from ortflex_core.compiler.onnx_files.model_file import structure

from tests.fuzz import seeds
from tests.fuzz.mutants import mutated_model


def one(data: bytes) -> None:
    """Read a model and look at all of it."""
    try:
        model = Model(data)
        model.unknown()
        for name in model.initializers:
            model.initializer(name)
        structure(model.proto)
        model.export({})
    except OrtflexError:
        return


def mutated(data: bytes, longest: int, seed: int) -> bytes:
    """Half by fields, half by bytes."""
    rng = Random(seed)
    try:
        changed = mutated_model(rng, data) if rng.random() < 0.5 else b""
    except Exception:  # it is no model any more
        changed = b""
    changed = changed or bytes(atheris.Mutate(data, longest))
    return changed[:longest]


def main() -> None:
    corpus = Path(sys.argv[1])
    corpus.mkdir(exist_ok=True)
    for name, content in seeds.all_models().items():
        (corpus / name).write_bytes(content)
    options = ["-timeout=10", "-rss_limit_mb=1024", "-max_len=20000"]
    atheris.Setup([sys.argv[0], str(corpus), *options, *sys.argv[2:]], one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
