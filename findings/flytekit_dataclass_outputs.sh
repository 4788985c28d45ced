#!/usr/bin/env bash
# flytekit 1.16.31: a task whose declared dataclass has a field that cannot be written is accepted, and fails after its body.
#
# Declaring the task makes a JSON schema of the dataclass. If that fails, flytekit logs an error and goes on, and the task can
# be registered. The encoder of the dataclass, which mashumaro makes of the types alone, is made when there is a value. So a
# task that has trained for hours raises UnserializableField for a type that was known before. To see this early, make
# mashumaro.codecs.msgpack.MessagePackEncoder(Dataclass) where the task is declared.
#
# Seen on 29 November 2026, Python 3.11, mashumaro 3.23:
#   declared
#   the body has run
#   UnserializableField: Field "extra" of type object in Best is not serializable
#   early: UnserializableField
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flytekit==1.16.31 mashumaro==3.23
cat > "$folder/program.py" <<'END'
from dataclasses import dataclass

from flytekit import task
from mashumaro.codecs.msgpack import MessagePackEncoder

@dataclass
class Best:
    step: int
    extra: object

@task
def train() -> Best:
    print("the body has run")
    return Best(3, None)

print("declared")
try:
    train()
except Exception as error:
    while error.__cause__ is not None:
        error = error.__cause__
    print(f"{type(error).__name__}: {error}")
try:
    MessagePackEncoder(Best)
except Exception as error:
    print(f"early: {type(error).__name__}")
END
HOME="$folder" FLYTE_SDK_LOGGING_LEVEL=50 "$folder/venv/bin/python" "$folder/program.py" 2> /dev/null | tee "$folder/seen"
diff "$folder/seen" - <<'END'
declared
the body has run
UnserializableField: Field "extra" of type object in Best is not serializable
early: UnserializableField
END
