#!/usr/bin/env bash
# flyte 2.12.1: `flyte run FILE TASK --help` omits the task's docstring, and prints the whole JSON schema of a dataclass input.
#
# TaskEnvironment.task documents its option docs with "if not provided the function docstring will be used". The help of the
# command reads task.docs only, which stays None. The descriptions of Args are parsed only for a deployment. In their place,
# the help of an option has the literal type's metadata, a Python dict with the schema: for a dataclass of 50 fields several
# hundred lines. To have help, pass docs=flyte.Documentation(inspect.getdoc(function)).
#
# Seen on 30 November 2026, Python 3.11:
#   docstring: no
#   description of the argument: no
#   schema: yes
#   docstring with docs=: yes
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flyte==2.12.1
cd "$folder"
cat > program.py <<'END'
from dataclasses import dataclass

import flyte

env = flyte.TaskEnvironment("trainings")


@dataclass
class Settings:
    epochs: int = 3


@env.task
async def train(settings: Settings = Settings()) -> int:
    """Fit a model.

    Args:
        settings: How to fit it.
    """
    return settings.epochs


@env.task(docs=flyte.Documentation("Fit a model."))
async def train_with_docs(settings: Settings = Settings()) -> int:
    return settings.epochs
END
for task in train train_with_docs; do
    HOME="$folder" FLYTE_DISABLE_SENTRY=true COLUMNS=200 venv/bin/flyte run program.py $task --help > $task.txt 2>&1
done
has() { grep -q "$1" "$2" && echo yes || echo no; }
{
    echo "docstring: $(has 'Fit a model' train.txt)"
    echo "description of the argument: $(has 'How to fit it' train.txt)"
    echo "schema: $(has "'properties'" train.txt)"
    echo "docstring with docs=: $(has 'Fit a model' train_with_docs.txt)"
} | tee seen
diff seen - <<'END'
docstring: no
description of the argument: no
schema: yes
docstring with docs=: yes
END
