"""Objective with a token at each position of a text: cross-entropy, perplexity and token accuracy."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.core.objectives.objective import HIGHER, LOWER, Columns, Facts, Objective
from flyte_ddp.core.objectives.table_columns import TableColumns
from flyte_ddp.core.samples.leaves import IGNORED_TOKEN, Leaves, name_leaves
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.objectives.requirements import check_output_shape, check_target_type, check_target_values

LONGEST_TEXT = 200  # characters of a prediction in a table


class Language(Objective):
    """Objective for token numbers int64 [n, T] as targets, and logits [n, T, tokens] as outputs.

    A target of -100 does not count. The model may also return an object or dict with ``logits``, or a tuple that begins
    with the logits. ``num_classes`` is the number of tokens.

    The option ``decode`` names the user's callable that makes a text of a list of tokens, for tables and the report.
    The option ``shift`` is for targets that equal the inputs. With ``shift``, the logits at a position are compared
    with the target at the next position.
    """

    measures: Mapping[str, str] = {"perplexity": LOWER, "token_accuracy": HIGHER}
    loss_unit = "cross-entropy (nats a token)"
    counts_tokens = True

    def __init__(self, facts: Facts, *, shift: bool = False, decode: str = "") -> None:
        super().__init__(facts)
        self.shift = shift
        self.decode: Callable[[list[int]], str] | None = load_callable(decode) if decode else None

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless ``targets`` [samples, positions] are token numbers, or -100 (ignored)."""
        check_target_type("language", targets, (2,), "iu", "whole numbers [samples, positions]")
        rule = (
            f"0..{self.outputs - 1} with {self.outputs} tokens (num_classes), or {IGNORED_TOKEN} for ignored positions"
        )
        check_target_values(
            "language", targets, lambda part: (part == IGNORED_TOKEN) | ((part >= 0) & (part < self.outputs)), rule
        )

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the outputs have logits [samples, positions, tokens].

        ``model`` is named in the error.
        """
        shape = *targets.shape, self.outputs
        check_output_shape(
            model,
            extract_token_logits(outputs),
            shape,
            "(samples, positions, classes)",
            "size its last layer by num_classes",
        )

    def describe_wrong_targets(self, inputs: Leaves, targets: Leaves) -> str:
        """Return a warning if the targets equal the inputs, or would be shifted twice. Otherwise return ""."""
        if not isinstance(targets, Tensor):
            return ""
        counted = targets != IGNORED_TOKEN
        followed = counted[:, :-1] & counted[:, 1:]
        option = 'options={"objective": {"shift": true}}'
        for leaf in name_leaves(inputs).values():
            if isinstance(leaf, Tensor) and leaf.shape == targets.shape and followed.any():
                copied = bool((leaf == targets)[counted].all())
                if copied and not self.shift:
                    return (
                        "The targets equal the inputs at all positions: the model learns to copy. To learn the next "
                        f"token, set {option}, or shift the targets."
                    )
                if self.shift and not copied and bool((leaf[:, 1:] == targets[:, :-1])[followed].all()):
                    return (
                        f"The targets are already the next tokens, and {option} shifts them by another position: the "
                        "model learns the token after the next. Remove shift."
                    )
        return ""

    def align_with_targets(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [n, P, tokens], and the targets [n, P] with which the logits are compared.

        The logits are fp32 or more. P is the number of positions, or one less with the option ``shift``.
        """
        logits: Tensor = extract_token_logits(outputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # logits in an object may still be bf16
        return (logits[:, :-1], targets[:, 1:]) if self.shift else (logits, targets)

    def weights(self, targets: Tensor) -> Tensor:
        return ((targets[:, 1:] if self.shift else targets) != IGNORED_TOKEN).to(torch.float32)

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each compared position, [n, P]. Ignored positions have a loss of 0."""
        logits, compared = self.align_with_targets(outputs, targets)
        flat = logits.flatten(0, 1), compared.flatten()  # several times as fast as with the tokens' dimension second
        losses = functional.cross_entropy(*flat, reduction="none", ignore_index=IGNORED_TOKEN)
        return losses.view(compared.shape)

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        logits, compared = self.align_with_targets(outputs, targets)
        return {"correct": ((logits.argmax(2) == compared) & (compared != IGNORED_TOKEN)).sum(1)}

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return ``perplexity`` (the exponential of a token's mean loss) and ``token_accuracy``.

        If no token counts, both are NaN.
        """
        tokens = columns["weight"].sum().item()
        if not tokens:
            return {"perplexity": math.nan, "token_accuracy": math.nan}
        mean = columns["loss"].sum().item() / tokens
        return {"perplexity": math.exp(min(mean, 700.0)), "token_accuracy": columns["correct"].sum().item() / tokens}

    def hide_padding(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return a copy of the logits that is NaN at all positions after the last counted target of each text."""
        still_count = (targets != IGNORED_TOKEN).flip(1).cumsum(1).flip(1)
        hidden: Tensor = extract_token_logits(outputs).masked_fill(still_count[..., None] == 0, math.nan)
        return hidden

    def answers(self, outputs: Any) -> TableColumns:
        """Return the likeliest tokens of each text, as the text column ``prediction``.

        Positions whose logits are NaN are skipped.
        """
        logits = extract_token_logits(outputs)
        tokens = logits.argmax(2).masked_fill(logits.isnan().any(2), IGNORED_TOKEN)
        return {"prediction": self.format_texts(tokens)}

    def truths(self, targets: Tensor) -> TableColumns:
        return {"truth": self.format_texts(targets)}

    def format_texts(self, texts: Tensor) -> list[str]:
        return [self.format_tokens([token for token in row if token >= 0]) for row in texts.tolist()]

    def format_tokens(self, tokens: list[int]) -> str:
        """Return the first 200 tokens as a text of at most 200 characters.

        If the option ``decode`` is set, calls the user's function. Otherwise joins the tokens' names, by spaces unless
        all names are single characters.
        """
        if self.decode is not None:
            return str(self.decode(tokens[:LONGEST_TEXT]))[:LONGEST_TEXT]
        names = [self.facts.classes[token] for token in tokens[:LONGEST_TEXT]]
        return ("" if all(len(name) == 1 for name in self.facts.classes) else " ").join(names)[:LONGEST_TEXT]


def extract_token_logits(outputs: Any) -> Any:
    """Return the logits in a model's outputs.

    The logits are ``logits`` of an object or dict, the first item of a tuple, or the outputs themselves. If a dict has
    no ``logits``, returns None.
    """
    if hasattr(outputs, "logits"):  # checked before the items of transformers' dicts, which are another copy
        return outputs.logits
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return outputs[0] if isinstance(outputs, tuple) and outputs else outputs
