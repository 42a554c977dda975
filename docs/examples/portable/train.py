"""One pass with numpy and onnxruntime alone: ``python train.py step X.npy y.npy``."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


class Step:
    def __init__(self, folder):
        self.file, options = Path(folder, "state.safetensors"), ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(Path(folder, "step.onnx"), options)
        self.manifest = json.loads(Path(folder, "manifest.json").read_text("utf-8"))
        self.scalars = {i["in"]: i["default"] for i in self.manifest["step"] if "default" in i}
        self.moving = [i for i in self.manifest["step"] if i["in"] and i["out"]]
        raw, self.places, self.state = self.file.read_bytes(), {}, {}
        start = 8 + int.from_bytes(raw[:8], "little")
        self.head, self.data, info = raw[:start], bytearray(raw[start:]), json.loads(raw[8:start])
        for i in self.moving:
            self.places[i["in"]] = place = slice(*info[i["in"]]["data_offsets"])
            self.state[i["in"]] = np.frombuffer(self.data[place], i["dtype"]).reshape(i["shape"])

    def run(self, batches, **scalars):  # batches: [{"data": X, "label": y}, …]
        feeds = self.state | {k: np.asarray(v, float) for k, v in (self.scalars | scalars).items()}
        for i in (i for i in self.manifest["step"] if i["batch"] is not None):
            batch = batches[i["batch"]]
            a = np.asarray(batch.get(i["of"], batch.get(i["role"])), i["dtype"])
            feeds[i["in"]] = a.reshape(a.shape + (1,) * (len(i["shape"]) - a.ndim))
        names = (o.name for o in self.session.get_outputs())
        out = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.state = {i["in"]: out[i["out"]] for i in self.moving}
        return sum(out[i["out"]] for i in self.manifest["step"] if i["role"] in ("loss", "penalty"))

    def save(self):
        for name, array in self.state.items():
            self.data[self.places[name]] = array.tobytes()
        self.file.write_bytes(self.head + self.data)  # the header as it was


if __name__ == "__main__":
    step, X, y = Step(sys.argv[1]), np.load(sys.argv[2]), np.load(sys.argv[3])
    for part in step.manifest["not_portable"]:
        print(f"not in the step: {part['name']}: {part['why']}", file=sys.stderr)
    n, count = step.manifest["rows"] or 32, step.manifest["batches_per_run"]
    parts = [{"data": X[k : k + n], "label": y[k : k + n]} for k in range(0, len(X) - n + 1, n)]
    print([step.run(parts[k - count : k]) for k in range(count, len(parts) + 1, count)])
    step.save()
