"""Engines that are optional: their Flyte plugins, and what is said where one is not installed."""

import importlib.util
import sys


def installed(name: str) -> bool:
    """Whether the plugin is there; where it is not, says which workflow is left out, and how to have it.

    Args:
        name: of the plugin's module, in ``flytekitplugins``, and of our extra.

    """
    plugin = f"flytekitplugins.{'kfpytorch' if name == 'elastic' else name}"
    try:
        found = importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:  # there is no plugin at all
        found = False
    if not found:
        message = f"{name}_training_wf is left out, as {plugin} is not installed; for it, install flyte-ddp[{name}]"
        print(message, file=sys.stderr, flush=True)
    return found
