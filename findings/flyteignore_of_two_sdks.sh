#!/usr/bin/env bash
# flytekit 1.16.31 and flyte 2.12.1 (the SDKs of Flyte 1 and 2) read the same file .flyteignore by different rules.
#
# A bare name, such as runs, is a folder at the top for flytekit, which reads Docker's patterns. For flyte, which reads
# Git's patterns, the name matches at any depth. A project that leaves out its results in runs/ for both SDKs loses the
# subpackage package/runs when it moves to Flyte 2, and its pods fail at the import. /runs and runs/** have the same
# meaning for both.
#
# Seen on 30 November 2026, Python 3.11:
#   pattern    flytekit sends                 flyte sends
#   runs       package/runs/a.py              -
#   /runs      package/runs/a.py              package/runs/a.py
#   runs/**    package/runs/a.py              package/runs/a.py
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export FLYTE_DISABLE_SENTRY=true HOME="$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    flytekit==1.16.31 flyte==2.12.1 rich-click==1.8.9
mkdir -p "$folder/project/package/runs" "$folder/project/runs"
cd "$folder/project"
touch package/runs/a.py runs/b.py
cat > "$folder/list.py" <<'END'
import asyncio
import tarfile
from pathlib import Path

from flyte._code_bundle.bundle import build_code_bundle
from flytekit.constants import CopyFileDetection
from flytekit.tools.fast_registration import FastPackageOptions, fast_package

here, parent = Path.cwd(), Path.cwd().parent


def list_files(archive):
    with tarfile.open(archive) as file:
        return " ".join(sorted(each.name for each in file if each.name.endswith(".py"))) or "-"


print(f"{'pattern':<10} {'flytekit sends':<30} flyte sends")
for pattern in ("runs", "/runs", "runs/**"):
    (here / ".flyteignore").write_text(pattern + "\n")
    options = FastPackageOptions([], copy_style=CopyFileDetection.ALL)
    old = fast_package(here, str(parent), options=options)
    new = asyncio.run(build_code_bundle(here, dryrun=True, copy_bundle_to=parent, copy_style="all")).tgz
    print(f"{pattern:<10} {list_files(old):<30} {list_files(new)}")
END
"$folder/venv/bin/python" "$folder/list.py" 2> "$folder/errors" | tee "$folder/seen" || cat "$folder/errors"
diff "$folder/seen" - <<'END'
pattern    flytekit sends                 flyte sends
runs       package/runs/a.py              -
/runs      package/runs/a.py              package/runs/a.py
runs/**    package/runs/a.py              package/runs/a.py
END
