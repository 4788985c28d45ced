#!/usr/bin/env bash
# torch 2.15.0: Optimizer.load_state_dict replaces each text in an optimiser's state by the text of a generator.
#
# It rebuilds what can be iterated as type(value)(... for v in value), which of a text is str(generator). torch.save and
# torch.load(weights_only=True) keep the text, and nothing is raised. Kron of pytorch-optimizer 3.8.0 keeps the formulas of
# torch.einsum in its state, so a training with it could not go on from a checkpoint. Release 4.1.0 puts them back itself.
#
# Seen on 29 November 2026, Python 3.11, numpy 2.4.6:
#   saved:  ij,jk->ik
#   loaded: <generator object Optimizer.load_state_dict.<locals>._cast.<locals>.<genexpr>
#   Kron 3.8.0: RuntimeError: einsum(): invalid subscript given at index 0 in the equation string
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" torch==2.15.0 numpy==2.4.6 pytorch-optimizer==3.8.0
cat > "$folder/program.py" <<'END'
import io
import re
import torch
from pytorch_optimizer import Kron

def of_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)

parameter = torch.nn.Parameter(torch.ones(2, 2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
optimizer.state[parameter] = {"formula": "ij,jk->ik"}
saved = of_file(optimizer.state_dict())
optimizer.load_state_dict(saved)
print("saved: ", saved["state"][0]["formula"])
print("loaded:", re.sub(" at 0x.*", "", optimizer.state[parameter]["formula"]))

parameter.grad = torch.ones(2, 2)
before, after = (Kron([parameter], pre_conditioner_update_probability=1.0) for _ in range(2))
before.step()
after.load_state_dict(of_file(before.state_dict()))
try:
    for _ in range(4):
        after.step()
    print("Kron 3.8.0: goes on")
except RuntimeError as error:
    print(f"Kron 3.8.0: RuntimeError: {str(error).partition(',')[0]}")
END
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
saved:  ij,jk->ik
loaded: <generator object Optimizer.load_state_dict.<locals>._cast.<locals>.<genexpr>
Kron 3.8.0: RuntimeError: einsum(): invalid subscript given at index 0 in the equation string
END
