"""The portable step in C++: the sketch of the how-to page, compiled, makes the steps of the Python runner.

``ORTFLEX_ONNXRUNTIME`` is a folder with ``include/onnxruntime_cxx_api.h`` and ``lib/libonnxruntime.so``, as
in the archives of onnxruntime's releases.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.end_to_end.portable_cases import fused, runner
from tests.training import regression

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "train-outside-python.md"
PROGRAM = """
#include <onnxruntime_cxx_api.h>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

struct Batch { std::vector<float> x, y; };

int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::AllocatorWithDefaultOptions memory;
  std::vector<std::string> old_names, new_names;
  std::vector<Ort::Value> start;
  std::ifstream plan("plan.txt");
  std::string line;
  while (std::getline(plan, line)) {
    std::istringstream words(line);
    std::string name, next, type;
    size_t rank, count = 1;
    double value;
    words >> name >> next >> type >> rank;
    std::vector<int64_t> shape(rank);
    for (auto& size : shape) { words >> size; count *= size; }
    bool whole = type == "int64";
    start.push_back(whole ? Ort::Value::CreateTensor<int64_t>(memory, shape.data(), rank)
                          : Ort::Value::CreateTensor<float>(memory, shape.data(), rank));
    for (size_t k = 0; k < count; k++) {
      words >> value;
      if (whole) start.back().GetTensorMutableData<int64_t>()[k] = static_cast<int64_t>(value);
      else start.back().GetTensorMutableData<float>()[k] = static_cast<float>(value);
    }
    old_names.push_back(name);
    new_names.push_back(next);
  }
  std::vector<Batch> batches;
  std::ifstream rows("rows.bin", std::ios::binary);
  for (int k = 0; k < 8; k++) {
    Batch batch{std::vector<float>(40), std::vector<float>(8)};
    rows.read(reinterpret_cast<char*>(batch.x.data()), 160);
    rows.read(reinterpret_cast<char*>(batch.y.data()), 32);
    batches.push_back(batch);
  }
  int64_t x_shape[] = {8, 5}, y_shape[] = {8, 1};
  SKETCH
}
"""
FILLED = """
inputs = {"X", "label"};
for (auto& name : old_names) inputs.push_back(name.c_str());
for (auto& name : new_names) outputs.push_back(name.c_str());
outputs.push_back("loss");
state = std::move(start);
"""


def test_the_sketch_compiles_and_makes_the_same_steps(tmp_path: Path) -> None:
    place = os.environ.get("ORTFLEX_ONNXRUNTIME")
    if shutil.which("g++") is None or place is None:
        pytest.skip("g++, or onnxruntime's headers and library (ORTFLEX_ONNXRUNTIME), are missing")
    X, y = regression(64, 5)
    trainer = fused(models.mlp((5, 8, 1)), optimizer="adam", learning_rate=0.01)
    trainer.export_step(tmp_path / "step", X, y, rows=8)
    step = runner().Step(tmp_path / "step")
    lines = []
    for item in step.moving:
        array = step.state[item["in"]]
        words = [item["in"], item["out"], array.dtype.name, array.ndim, *array.shape]
        lines.append(" ".join(map(str, [*words, *(repr(float(v)) for v in array.ravel())])))
    (tmp_path / "plan.txt").write_text("\n".join(lines) + "\n")
    parts = [(X[k : k + 8], y[k : k + 8]) for k in range(0, 64, 8)]
    (tmp_path / "rows.bin").write_bytes(b"".join(a.tobytes() for part in parts for a in part))
    found = re.search(r"```cpp\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    declared, _, loop = found[1].partition("for (auto& batch : batches)")
    sketch = f"{declared}{FILLED}for (auto& batch : batches){loop}"
    (tmp_path / "main.cpp").write_text(PROGRAM.replace("SKETCH", sketch), encoding="utf-8")
    library = Path(place, "lib", "libonnxruntime.so")
    command = ["g++", "-std=c++17", f"-I{Path(place, 'include')}", "main.cpp", str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", "train"]
    subprocess.run(command, cwd=tmp_path, check=True)
    out = subprocess.run(["./train"], cwd=tmp_path, check=True, capture_output=True, text=True)
    wanted = [step.run([{"data": a, "label": b}]) for a, b in parts]
    np.testing.assert_allclose([float(v) for v in out.stdout.split()], wanted, rtol=1e-5)
