"""Verify that a trained model's file holds all of the model: a new model with its weights must give the same logits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp.errors import UserError
from flyte_ddp.models.artifacts import load_weights
from flyte_ddp.parallel.dropout import make_dropout_rank_independent
from flyte_ddp.training.training_state import TrainingState

BATCH = 64  # number of test samples
TOLERANCE = 1e-3  # share of the largest logit; a GPU may compute convolutions in TF32, with 10 bits


def verify_saved_model(new: nn.Module, model_path: Path, sidecar: Mapping[str, Any], state: TrainingState) -> None:
    """Load saved weights into a new model and compare its logits on the first test samples with the trained model's.

    Reads the weights' file. Changes ``new``: its weights, device, type, mode and dropout layers. Raises UserError if
    the logits differ, or the new model does not take the weights.

    Args:
        new: a model that was built as the trained model was.
        model_path: the file with the trained model's weights.
        sidecar: content of the file's sidecar.
        state: the training state, with the trained model.
    """
    samples = state.test.order.samples(slice(0, min(BATCH, len(state.test))))
    images = state.test.gather(samples).images
    load_weights(new, model_path, sidecar)
    model = new.to(state.device).eval()
    make_dropout_rank_independent(model, state.this_pass)  # a user's model may use dropout in evaluations, too
    if state.dtype == torch.float64:
        model.double()
    with torch.no_grad(), state.evaluation_mode():
        expected = state.predict_logits(images)
        state.this_pass.begin_pass(state.hp.seed, 0, np.arange(len(images)), state.device)
        found: Tensor = model.to(memory_format=state.memory_format)(state.prepare(images))
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
    # A model may mask classes by infinite logits: they must be equal, and are left out of the largest logit.
    if not torch.allclose(found, expected, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True):
        apart = (found - expected).abs().nan_to_num(nan=0.0, posinf=torch.inf).max().item()
        raise UserError(
            f"model {state.hp.model!r}: its file does not hold all of it: a new model with these weights gives other "
            f"logits (by up to {apart:.2g}, where the largest is {largest:.2g}); keep what its forward pass uses in "
            "parameters, in buffers, or the same in each new model"
        )
