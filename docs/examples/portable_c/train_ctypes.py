"""Train with the library of an exported step: python train_ctypes.py libstep.so EPOCHS x.bin label.bin."""

import ctypes
import sys

import numpy as np

library = ctypes.CDLL(sys.argv[1])
for name in ("step_rows", "step_state_bytes", "step_memory_bytes"):
    getattr(library, name).restype = ctypes.c_int64
rows = library.step_rows()


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


x, label = np.fromfile(sys.argv[3], np.float32), np.fromfile(sys.argv[4], np.int64)
steps = len(label) // rows
state = np.zeros(library.step_state_bytes(), np.uint8)
memory = np.zeros(library.step_memory_bytes(), np.uint8)
losses = np.zeros(steps)
library.step_start(address(state))
for epoch in range(int(sys.argv[2])):
    # Without rows (NULL) the batches are taken in order; without settings, the defaults hold.
    wrong = library.step_train(
        *map(address, (state, memory, x, label)), None, ctypes.c_int64(steps), None, address(losses)
    )
    assert not wrong, "a label is out of range"
    print(f"epoch {epoch + 1}: loss {losses.mean():.6g}")

save_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
with open("state.safetensors", "wb") as file:

    @save_type
    def write(_context: int, start: int, count: int) -> int:
        return int(file.write(ctypes.string_at(start, count)) != count)

    library.step_save(address(state), write, None)
