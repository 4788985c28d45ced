#!/usr/bin/env bash
# schedulefree 1.4.1: the example in ScheduleFreeWrapper's docstring, with torch's RMSprop, fails in the first step.
#
# The wrapper puts its own z into the state of each parameter before the wrapped optimiser's first step. RMSprop makes its
# state where a parameter has none yet (len(state) == 0), as Adam and AdamW do, and so never does. SGD
# asks for its one key instead, and Adagrad makes its state when it is made: both work.
#
# Seen on 29 November 2026, Python 3.11, torch 2.15.0, numpy 2.4.6:
#   RMSprop: KeyError: 'square_avg'
#   AdamW: KeyError: 'exp_avg'
#   Adagrad: works
#   SGD: works
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" torch==2.15.0 numpy==2.4.6 schedulefree==1.4.1
cat > "$folder/program.py" <<'END'
import torch
from schedulefree import ScheduleFreeWrapper

for kind in (torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD):
    model = torch.nn.Linear(2, 2)
    optimizer = ScheduleFreeWrapper(kind(model.parameters(), lr=0.0025), momentum=0.9, weight_decay_at_y=0.1)
    optimizer.train()
    model(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.step()
        print(f"{kind.__name__}: works")
    except Exception as error:
        print(f"{kind.__name__}: {type(error).__name__}: {error}")
END
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
RMSprop: KeyError: 'square_avg'
AdamW: KeyError: 'exp_avg'
Adagrad: works
SGD: works
END
