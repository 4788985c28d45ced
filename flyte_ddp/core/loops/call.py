"""A user-defined function with its arguments, as ranks receive the call. ``flyte_ddp/calls.py`` makes calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

RETURNED = "returned.pickle"  # rank 0's return value, in the run's folder until the launcher has read the file


@dataclass(frozen=True)
class Call:
    """A pickled function with its arguments, used as a Work's ``arguments``.

    Only ranks unpickle the call and import its modules.
    """

    name: str  # of the function, for people
    payload: bytes  # pickle of the function, the positional and the keyword arguments
    shown: Mapping[str, Any]  # the arguments by name, as JSON values
    code: str  # digest of the function's sources
    user_code: tuple[str, ...] = ()  # package.module:callable of users, whose sources other hosts may lack

    def load(self) -> partial[Any]:
        """Unpickle the call, and return a function to call without arguments.

        Imports the modules of the call.
        """
        function, args, kwargs = cloudpickle.loads(self.payload)
        return partial(function, *args, **kwargs)
