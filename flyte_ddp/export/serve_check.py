"""Asks model.onnx beside this file again what golden.npz holds; needs numpy and onnxruntime, and no torch."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

here = Path(__file__).parent
session = onnxruntime.InferenceSession(here / "model.onnx", providers=["CPUExecutionProvider"])
golden = dict(np.load(here / "golden.npz"))


def read_part(start: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(start): values for name, values in golden.items() if name.startswith(start)}


numbers = sorted({name.partition("/")[0] for name in golden} - {"tolerance"})
requests = [(read_part(f"{number}/inputs/"), read_part(f"{number}/outputs/")) for number in numbers]
allowed = read_part("tolerance/")
worst = dict.fromkeys(allowed, np.float64(0))
for inputs, outputs in requests:
    for name, found in zip(outputs, session.run([*outputs], inputs), strict=True):
        worst[name] = np.maximum(worst[name], np.abs(found - outputs[name]).max(initial=0))
for name in allowed:
    print(f"{len(requests)} requests; {name} differ by {worst[name]:.2g} at most, {allowed[name]:.2g} is allowed")
sys.exit(0 if all(worst[name] <= allowed[name] for name in allowed) else 1)
