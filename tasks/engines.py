"""Optional engines: the module that each one needs, and the message if it is not installed."""

import importlib.util
import sys
from contextlib import suppress

from flyte_ddp.errors import install_hint

NEEDED = {"elastic": "flytekitplugins.kfpytorch", "ray": "flytekitplugins.ray", "dask": "flytekitplugins.dask"}
left_out: dict[str, str] = {}  # message that says what to install, by the name of the workflow


def is_engine_installed(name: str) -> bool:
    """Return whether elastic, ray or dask is installed; if not, print to stderr how to install it, and set left_out."""
    with suppress(ModuleNotFoundError):  # no plugin of flytekit is installed
        if importlib.util.find_spec(NEEDED[name]) is not None:  # a plugin needs its engine, so that is installed too
            return True
    workflow = f"{name}_training_wf"
    left_out[workflow] = f"{workflow} is left out, as {NEEDED[name]} is not installed: {install_hint(name)}"
    print(left_out[workflow], file=sys.stderr, flush=True)
    return False
