"""wandb, beside the training: nothing that it does is noticed there."""
