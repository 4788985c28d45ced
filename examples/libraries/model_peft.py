# /// script
# dependencies = [
#     "peft==0.21.2",
#     "transformers==5.24.0",
#     "annotated-doc==0.0.7",
#     "regex==2026.11.19",
#     "shellingham==1.5.4",
#     "tokenizers==0.23.3",
#     "typer==0.29.2",
# ]
# ///
"""peft: LoRA on a frozen BERT, with a fully trained head.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.libraries.model_transformers:read_texts", "collate": "padded",
    "model": "examples.libraries.model_peft:make_model",
    "optimizer": "adamw", "learning_rate": 0.01, "batch_size": 16, "epochs": 2}'

Only the parameters with `requires_grad` after `get_peft_model` are trained. `model.pt` also holds the frozen weights.
`flyte_ddp.load_model(...)[0].save_pretrained(folder)` writes the adapter alone.
"""

from peft import LoraConfig, get_peft_model
from torch import nn

from examples.libraries.model_transformers import Bert


def make_model(num_classes: int, input_shape: tuple[int | None, ...], rank: int = 4) -> nn.Module:
    base = Bert(num_classes, input_shape)  # load the pretrained weights here
    lora = LoraConfig(r=rank, lora_dropout=0.1, target_modules=["query", "value"], modules_to_save=["classifier"])
    model: nn.Module = get_peft_model(base, lora)
    return model
