"""Objectives of users that say nothing, or the wrong thing, of their outputs."""

from typing import Any

from torch import Tensor

from flyte_ddp.objectives import Objective


class Plain(Objective):
    """No measures and no columns of its own: the absolute error of numbers, 0 for unknown ones."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.nan_to_num()).abs().sum(1)


class Mute(Plain):
    """Fails where it is to tell people something."""

    def answers(self, outputs: Tensor) -> dict[str, Any]:
        raise ValueError("no words")


class Twice(Plain):
    """Calls an answer as the truth is called."""

    def answers(self, outputs: Tensor) -> dict[str, Any]:
        return {"truth_0": outputs[:, 0].tolist()}
