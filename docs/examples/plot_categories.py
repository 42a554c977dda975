"""
Tabular data with categories: several inputs, an embedding
==========================================================

A model may have several inputs of different types. This model has a table of numbers and a column of
category numbers, whose embedding is trained with the other weights. The data is a mapping with the names
of the inputs.
"""

import matplotlib.pyplot as plt
import numpy as np
from onnx import numpy_helper, parser

from ortflex import Trainer

rng = np.random.default_rng(0)
CITIES, SIZE = 30, 2

model = parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    price (float[N, 4] numbers, int64[N] city) => (float[N, 1] price)
    { place = Gather (cities, city)
      row = Concat <axis = 1> (numbers, place)
      h = Gemm (row, W1, b1)
      r = Relu (h)
      price = Gemm (r, W2, b2) }"""
)
for name, shape in {
    "cities": (CITIES, SIZE),
    "W1": (4 + SIZE, 32),
    "b1": (32,),
    "W2": (32, 1),
    "b2": (1,),
}.items():
    array = (0.3 * rng.standard_normal(shape)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, name))

rows = 4000
level = rng.standard_normal(CITIES)
city = rng.integers(0, CITIES, rows)
numbers = rng.standard_normal((rows, 4)).astype(np.float32)
price = np.abs(numbers[:, 0]) + 0.5 * numbers[:, 1] + 1.5 * level[city]
price = (price + 0.1 * rng.standard_normal(rows)).astype(np.float32)
train, test = slice(0, 3000), slice(3000, None)

trainer = Trainer(
    model,
    loss="squared_error",
    optimizer="adam",
    learning_rate=0.005,
    penalty={"cities": {"l2": 1e-5}},
    epochs=15,
    metrics="r2",
    progress=False,
)
print(trainer.describe())
history = trainer.fit(
    {"numbers": numbers[train], "city": city[train]},
    price[train],
    validation_data=({"numbers": numbers[test], "city": city[test]}, price[test]),
)

# %%
# The embedding orders the cities by their level
# ----------------------------------------------

cities = trainer.get_state()["cities"]
direction = np.linalg.lstsq(np.c_[cities, np.ones(CITIES)], level, rcond=None)[0]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(history["validation_r2"])
left.set_xlabel("epoch")
left.set_ylabel("R², validation")
right.scatter(level, np.c_[cities, np.ones(CITIES)] @ direction)
right.set_xlabel("level of a city, unknown to the model")
right.set_ylabel("read from its embedding")
