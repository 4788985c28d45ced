"""Optional engines: the modules that each one needs, and the message if one is not installed."""

import importlib.util
import sys
from contextlib import suppress

from flyte_ddp.errors import how_to_install

NEEDED = {
    "elastic": ("flytekitplugins.kfpytorch",),
    "ray": ("flytekitplugins.ray", "ray"),
    "dask": ("flytekitplugins.dask", "distributed"),
}
left_out: dict[str, str] = {}  # message that says what to install, by the name of the workflow


def is_engine_installed(name: str) -> bool:
    """Return whether an engine is installed; if not, print to stderr how to install it and put that into left_out.

    Args:
        name: elastic, ray or dask: the name of the engine and of our extra.
    """
    for module in NEEDED[name]:
        with suppress(ModuleNotFoundError):  # its parent package is missing
            if importlib.util.find_spec(module) is not None:
                continue
        workflow = f"{name}_training_wf"
        left_out[workflow] = f"{workflow} is left out, as {module} is not installed: {how_to_install(name)}"
        print(left_out[workflow], file=sys.stderr, flush=True)
        return False
    return True
