#!/usr/bin/env bash
# flyte 2.12.1 (the SDK of Flyte 2): an error that a task declares final is final for this task, but not for its caller.
#
# NonRecoverableError ends a task without the remaining retries. The task that awaits it gets another type of error,
# RuntimeUserError, which does not end the caller's retries. So a caller with retries=2 calls the child three times, and
# a mistake is repeated by the retries of each level of callers. Local run.
#
# Seen on 30 November 2026, Python 3.11:
#   RuntimeUserError: final
#   calls of the child: 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FLYTE_DISABLE_SENTRY=true HOME="$folder"
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flyte==2.12.1 rich-click==1.8.9
cat > tasks.py <<'END'
import flyte
import flyte.errors

env = flyte.TaskEnvironment("errors")
calls = []


@env.task
async def child() -> int:
    calls.append("child")
    raise flyte.errors.NonRecoverableError("final")


@env.task(retries=2)
async def caller() -> int:
    return await child()


flyte.init()
try:
    flyte.run(caller)
except flyte.errors.RuntimeUserError as error:
    print(f"{type(error).__name__}: {error}")
print("calls of the child:", len(calls))
END
"$folder/venv/bin/python" tasks.py 2>/dev/null | grep -E "^(Runtime|calls)" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
RuntimeUserError: final
calls of the child: 3
END
