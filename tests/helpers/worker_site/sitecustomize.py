"""Python runs this when it starts: agents on Ray, and so ranks, get the environment of the test that is running."""

import json
import os
import sys
from pathlib import Path

if "flyte_ddp.launch.remote.agent" in sys.orig_argv:
    variables = json.loads(Path(os.environ["RANKS_ENVIRONMENT"]).read_text())
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)
        os.execv(sys.executable, sys.orig_argv)  # so that the processes of a test are known by their environment
