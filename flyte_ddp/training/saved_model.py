"""Verify that the file of a trained model holds all of it: loaded into a new model, it must give the same logits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flyte_ddp.errors import UserError
from flyte_ddp.models.artifacts import load_weights
from flyte_ddp.parallel.dropout import derive_dropout_from_samples
from flyte_ddp.training.training_state import TrainingState

BATCH = 64  # test samples that both models get
TOLERANCE = 1e-3  # of the largest logit; a GPU's convolutions may be in TF32, of 10 bits


def verify_saved_model(new: nn.Module, model_path: Path, sidecar: Mapping[str, Any], state: TrainingState) -> None:
    """Load the saved weights into a new model and compare its logits on a batch of test samples with the trained one's.

    Reads the file, and moves the new model to the state's device.

    Args:
        new: a model that was built as the trained one was.
        model_path: the file with the trained model's weights.
        sidecar: what is kept beside the file.
        state: of training, with the trained model.

    Raises:
        UserError: the logits differ, or the new model does not take the weights.
    """
    samples = state.test.order.samples(slice(0, min(BATCH, len(state.test))))
    images = state.test.gather(samples).images
    load_weights(new, model_path, sidecar)
    model = new.to(state.device).eval()
    derive_dropout_from_samples(model, state.this_pass)  # for models that drop in evaluations, too
    if state.dtype == torch.float64:
        model.double()
    with torch.no_grad(), state.evaluating():
        expected = state.predict(images)
        state.this_pass.begin_pass(state.hp.seed, 0, np.arange(len(images)), state.device)
        found: Tensor = model.to(memory_format=state.memory_format)(state.prepare(images))
    largest = expected.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
    # A model may mask classes by an infinite logit: infinities must be equal, and count for no distance.
    if not torch.allclose(found, expected, rtol=0.0, atol=TOLERANCE * largest, equal_nan=True):
        apart = (found - expected).abs().nan_to_num(nan=0.0, posinf=torch.inf).max().item()
        raise UserError(
            f"model {state.hp.model!r}: its file does not hold all of it, as a new model with these weights gives "
            f"other logits (by up to {apart:.2g}, where the largest is {largest:.2g}); keep what its forward pass uses "
            "in parameters, in buffers, or the same in each new model"
        )
