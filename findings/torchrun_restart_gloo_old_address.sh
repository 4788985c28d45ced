#!/usr/bin/env bash
# torch 2.15.0: workers that torchrun restarts may look for gloo's addresses of the workers before, and fail.
#
# By default torchrun and its workers share one TCP store, and a restart keeps the store. torch.distributed reads and
# writes the workers' addresses there under the same keys as before (its code says "We create a new TCPStore for every
# retry"). So a worker that reads before the other has written gets the address of a process that has ended. gloo's
# connection is refused, and --max-restarts is used up. Here the restarted rank 1 comes 5 s later than rank 0, as it may
# where one host is slower. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 the restart succeeds.
#
# Seen on 29 November 2026, Python 3.11:
#   shared store: exit code 1, "Gloo connectFullMesh failed", Connection refused
#   own store: exit code 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" torch==2.15.0 numpy==2.4.6
cat > "$folder/train.py" <<'END'
import os
import time

import torch
from torch import distributed

restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if restarted and os.environ["RANK"] == "1":
    time.sleep(5)
distributed.init_process_group("gloo")
distributed.all_reduce(torch.ones(1))
if not restarted and os.environ["RANK"] == "1":
    raise SystemExit(1)
distributed.destroy_process_group()
END
for without in 0 1; do
    code=0
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$without "$folder/venv/bin/python" -m torch.distributed.run --standalone \
        --local-addr=127.0.0.1 --nproc-per-node=2 --max-restarts=1 --monitor-interval=0.1 "$folder/train.py" \
        &> "$folder/log" || code=$?
    refused=$(grep -c "RuntimeError: Gloo connectFullMesh failed.*Connection refused" "$folder/log" || true)
    echo "share disabled: $without, exit code: $code, refused: $((refused > 0))"
done | tee "$folder/seen"
diff "$folder/seen" - <<'END'
share disabled: 0, exit code: 1, refused: 1
share disabled: 1, exit code: 0, refused: 0
END
