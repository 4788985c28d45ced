#!/usr/bin/env bash
# flyte 2.12.1 (the SDK of Flyte 2): the cache behavior for a version of one's own is not answered in local runs.
#
# Its documentation names behavior="override" for a cache version that the user gives. A local run stores the results
# of such a task, but never looks them up, so the task runs at each call. With behavior="auto" and the same
# version_override the second call is answered from the cache.
#
# Seen on 30 November 2026, Python 3.11:
#   override ran 2 times, auto ran 1 times
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FLYTE_DISABLE_SENTRY=true HOME="$folder"
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check flyte==2.12.1 rich-click==1.8.9
cat > tasks.py <<'END'
import flyte

env = flyte.TaskEnvironment("caches")
calls = []


@env.task(cache=flyte.Cache("override", version_override="1"))
async def by_override() -> int:
    calls.append("override")
    return 1


@env.task(cache=flyte.Cache("auto", version_override="1"))
async def by_auto() -> int:
    calls.append("auto")
    return 1


@env.task
async def both_twice() -> int:
    return sum([await task() for task in (by_override, by_auto, by_override, by_auto)])


flyte.init()
flyte.run(both_twice)
print(f"override ran {calls.count('override')} times, auto ran {calls.count('auto')} times")
END
"$folder/venv/bin/python" tasks.py 2>/dev/null | grep ran | tee "$folder/seen"
diff "$folder/seen" - <<'END'
override ran 2 times, auto ran 1 times
END
