"""The messages between a run's launching process and its child process for wandb."""

from dataclasses import dataclass

from flyte_ddp.core.checks.parsing import JsonObject


@dataclass(frozen=True)
class Order:
    """What the child is to send to wandb."""

    init_arguments: JsonObject  # of wandb.init
    offset: int  # the byte of metrics.jsonl where this attempt begins
    on_first_record: bool  # whether to open the run only when the user's function has recorded something


@dataclass(frozen=True)
class Status:
    """The state of the wandb run, as the child knows it."""

    url: str = ""  # of the opened run
    reason: str = ""  # of the last failure


ENDED = "ended"  # the launcher's second message, when training has ended
