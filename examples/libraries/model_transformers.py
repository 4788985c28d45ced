# /// script
# dependencies = [
#     "transformers==5.24.0",
#     "annotated-doc==0.0.7",
#     "regex==2026.11.19",
#     "shellingham==1.5.4",
#     "tokenizers==0.23.3",
#     "typer==0.29.2",
# ]
# ///
"""transformers: BERT from a configuration, for texts of different lengths.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.libraries.model_transformers:read_texts", "collate": "padded",
    "model": "examples.libraries.model_transformers:Bert",
    "optimizer": "adamw", "learning_rate": 0.003, "batch_size": 16, "epochs": 2}'

A subclass keeps the names of the weights, so that transformers can load `model.pt`. `classification` accepts logits
only. `language` finds `logits` in the outputs, so `GPT2LMHeadModel(config)` can be used unchanged.

With `padded` the mask is the last positional argument, which in transformers may be `past_key_values`. Therefore
`forward` should declare only the arguments of the batch, and pass the mask on by name.

Dropout of attention weights depends on the number of ranks, and the report notes this. Set the dropout to 0 in the
configuration.
"""

from typing import Any

import numpy as np
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from flyte_ddp import arrays

TOKENS = 23


class Bert(BertForSequenceClassification):
    def __init__(self, num_classes: int, input_shape: tuple[int | None, ...]) -> None:  # noqa: ARG002
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        exact = {"attention_probs_dropout_prob": 0.0}  # functional dropout depends on the number of ranks
        super().__init__(BertConfig(vocab_size=TOKENS, num_labels=num_classes, **sizes, **exact))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens, attention_mask=mask).logits
        return logits


# What it is tried with.
def read_texts(_: str) -> Any:
    """Return rows that count by ones, twos or threes. The class is the step."""
    random = np.random.default_rng(0)
    steps, lengths = random.integers(1, 4, 80), random.integers(5, 13, 80)
    texts = [np.arange(length) * step % TOKENS for length, step in zip(lengths, steps, strict=True)]
    return arrays((texts[:64], steps[:64] - 1), (texts[64:], steps[64:] - 1), classes=["one", "two", "three"])
