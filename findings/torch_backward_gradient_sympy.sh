#!/usr/bin/env bash
# torch 2.15.0: the first backward(gradient) of a process imports sympy, which backward() of the same product does not.
#
# A loss that is scaled by an argument of backward(), as for gradient accumulation, takes a fraction of a second more in
# the first step of each rank, on a CPU without torch.compile. torch checks the gradient's shape with helpers for symbolic
# shapes, whose module imports sympy. (loss * factor).backward() gives the same gradients, and sympy is never imported.
#
# Seen on 29 November 2026, Python 3.11, on a CPU:
#   import torch: sympy imported: False
#   (loss * factor).backward(): [0.5, 0.5, 0.5], sympy imported: False
#   loss.backward(factor): [0.5, 0.5, 0.5], sympy imported: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" torch==2.15.0
cat > "$folder/backward.py" <<'END'
import sys

import torch


def say(what: str) -> None:
    print(f"{what} sympy imported: {'sympy' in sys.modules}")


say("import torch:")
factor = torch.tensor(0.5)
weights = torch.ones(3, requires_grad=True)
(weights.sum() * factor).backward()
say(f"(loss * factor).backward(): {weights.grad.tolist()},")
weights.grad = None
weights.sum().backward(factor)
say(f"loss.backward(factor): {weights.grad.tolist()},")
END
"$folder/venv/bin/python" "$folder/backward.py" 2> /dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'END'
import torch: sympy imported: False
(loss * factor).backward(): [0.5, 0.5, 0.5], sympy imported: False
loss.backward(factor): [0.5, 0.5, 0.5], sympy imported: True
END
