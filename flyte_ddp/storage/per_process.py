"""One of something for each process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)


class PerProcess(Generic[Key, Made]):
    """Keeps what ``make`` gives for the last key, one for each process: connections are not for a forked child to use.

    However many threads ask, it is made once.
    """

    def __init__(self, make: Callable[[Key], Made]) -> None:
        self.make = make
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Without anything, and with a lock that no thread of a parent holds."""
        self.lock = threading.Lock()
        self.held: tuple[Key, Made] | None = None

    def __call__(self, key: Key) -> Made:
        """What goes with the key."""
        with self.lock:
            if self.held is None or self.held[0] != key:
                self.held = (key, self.make(key))
            return self.held[1]
