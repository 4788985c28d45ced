# /// script
# dependencies = ["safetensors==0.8.0"]
# ///
"""safetensors.

`get_slice` reads a single sample of a tensor, and `load_file` reads all samples.
"""

from safetensors import safe_open
from safetensors.torch import save_file

from flyte_ddp import on_demand


class Rows:
    def __init__(self, path):
        file = safe_open(path, "pt")
        self.inputs, self.labels = file.get_slice("inputs"), file.get_tensor("labels")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.inputs[number], self.labels[number]


def samples(source):
    return on_demand(Rows(f"{source}/train.safetensors"), Rows(f"{source}/test.safetensors"))


def write(folder, part, inputs, labels):
    import torch

    tensors = {"inputs": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
    save_file(tensors, folder / f"{part}.safetensors")
