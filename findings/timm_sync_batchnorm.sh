#!/usr/bin/env bash
# timm 1.0.31: torch's SyncBatchNorm.convert_sync_batchnorm makes another network of most of its convolutional models.
#
# torch's documents convert any model so before DistributedDataParallel. timm's BatchNormAct2d, a subclass of BatchNorm2d,
# also applies the activation. torch replaces the subclass by SyncBatchNorm, which has the activation as a child and never
# calls it. Nothing is said, and print(model) still shows the activations. timm.layers.convert_sync_batchnorm is right.
#
# Seen on 29 November 2026, Python 3.11, torch 2.15.0, on a CPU, in evaluation mode:
#   torch's conversion: 11 activations, equal outputs: False
#   timm's conversion: 11 activations, equal outputs: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" timm==1.0.31 torch==2.15.0
cat > "$folder/convert.py" <<'END'
import copy

import timm
import torch
from timm.layers import convert_sync_batchnorm

torch.manual_seed(0)
model = timm.create_model("test_efficientnet").eval()
images = torch.randn(2, 3, 64, 64)
for name, convert in {"torch's": torch.nn.SyncBatchNorm.convert_sync_batchnorm, "timm's": convert_sync_batchnorm}.items():
    made = convert(copy.deepcopy(model)).eval()
    activations = sum(isinstance(layer, torch.nn.SiLU) for layer in made.modules())
    print(f"{name} conversion: {activations} activations, equal outputs: {torch.allclose(made(images), model(images))}")
END
"$folder/venv/bin/python" "$folder/convert.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch's conversion: 11 activations, equal outputs: False
timm's conversion: 11 activations, equal outputs: True
END
