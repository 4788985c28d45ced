#!/usr/bin/env bash
# scipy 1.17.1: where the import of torch is blocked by sys.modules["torch"] = None, scipy.stats cannot be imported.
#
# Python documents None in sys.modules as the way to make an import fail with ModuleNotFoundError, and tests use it to show
# that a program runs without torch. scipy looks torch up in sys.modules without importing it, to tell torch's arrays from
# others, and takes None for the module. So a test of "runs without torch" fails in scipy, although scipy needs no torch.
# A finder on sys.meta_path that raises ModuleNotFoundError blocks the import without this.
#
# Seen on 28 November 2026, Python 3.11, numpy 2.4.6:
#   None in sys.modules: AttributeError: 'NoneType' object has no attribute 'Tensor'
#   a finder that raises: imported, torch in sys.modules: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check scipy==1.17.1 numpy==2.4.6
cat > "$folder/none.py" <<'END'
import sys
sys.modules["torch"] = None
try:
    import scipy.stats
    print("None in sys.modules: imported")
except AttributeError as error:
    print(f"None in sys.modules: {type(error).__name__}: {error}")
END
cat > "$folder/finder.py" <<'END'
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import scipy.stats
print("a finder that raises: imported, torch in sys.modules:", "torch" in sys.modules)
END
for program in none finder; do
    "$folder/venv/bin/python" "$folder/$program.py"
done | tee "$folder/seen"
diff "$folder/seen" - <<'END'
None in sys.modules: AttributeError: 'NoneType' object has no attribute 'Tensor'
a finder that raises: imported, torch in sys.modules: False
END
