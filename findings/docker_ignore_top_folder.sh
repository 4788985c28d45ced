#!/usr/bin/env bash
# docker 7.2.0 (the Python client): the pattern **/NAME of a .dockerignore leaves out a folder's files, but not at the top.
#
# Docker's documentation says that **/NAME matches in all folders, the root included, and that what is in an ignored folder
# is ignored. PatternMatcher of the Python client does so for "a/wandb/notes.txt", and says that "wandb/notes.txt" is kept.
# Flytekit packs sources by this matcher, so a folder at the top of a project is sent although the file names it.
# **/NAME/** leaves out the files at both places.
#
# Seen on 29 November 2026, Python 3.11:
#   **/wandb: wandb/notes.txt False, a/wandb/notes.txt True
#   **/wandb/**: wandb/notes.txt True, a/wandb/notes.txt True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check docker==7.2.0
"$folder/venv/bin/python" - <<'END' | tee "$folder/seen"
from docker.utils.build import PatternMatcher
for pattern in ("**/wandb", "**/wandb/**"):
    found = [f"{path} {PatternMatcher([pattern]).matches(path)}" for path in ("wandb/notes.txt", "a/wandb/notes.txt")]
    print(f"{pattern}: {', '.join(found)}")
END
diff "$folder/seen" - <<'END'
**/wandb: wandb/notes.txt False, a/wandb/notes.txt True
**/wandb/**: wandb/notes.txt True, a/wandb/notes.txt True
END
