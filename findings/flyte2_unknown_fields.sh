#!/usr/bin/env bash
# flyte 2.12.1 (the SDK of Flyte 2): `flyte run` drops unknown fields of a dataclass without a word.
#
# A misspelt field in the JSON of an option, such as epoch for epochs, is left out, and the task runs with the default.
# The command succeeds. A pydantic model with extra="forbid" would be refused. Local run.
#
# Seen on 30 November 2026, Python 3.11:
#   epochs: 10
#   exit status 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FLYTE_DISABLE_SENTRY=true HOME="$folder"
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flyte==2.12.1 rich-click==1.8.9
cat > tasks.py <<'END'
from dataclasses import dataclass

import flyte

env = flyte.TaskEnvironment("fields")


@dataclass
class Settings:
    epochs: int = 10


@env.task
async def train(settings: Settings) -> int:
    print("epochs:", settings.epochs)
    return settings.epochs
END
status=0
"$folder/venv/bin/flyte" run --local tasks.py train --settings '{"epoch": 3}' > output 2>&1 || status=$?
{ grep "^epochs" output; echo "exit status $status"; } | tee "$folder/seen"
diff "$folder/seen" - <<'END'
epochs: 10
exit status 0
END
