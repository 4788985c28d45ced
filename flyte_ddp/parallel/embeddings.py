"""Embeddings whose options look at the rows that one rank's samples use: ``max_norm`` and ``scale_grad_by_freq``."""

from torch import nn

from flyte_ddp.errors import UserError
from flyte_ddp.parallel.distributed import world_size

KINDS = (nn.Embedding, nn.EmbeddingBag)


def list_batch_dependent_embeddings(model: nn.Module) -> list[str]:
    """Return the names of the embeddings that have one of the two options."""
    named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, KINDS)]
    return [name or "Embedding" for name, layer in named if layer.max_norm is not None or layer.scale_grad_by_freq]


def refuse_rescaled_embeddings(model: nn.Module) -> None:
    """Raise UserError for an embedding with ``max_norm``, whose weights several ranks would change differently."""
    for name, layer in model.named_modules():
        if world_size() > 1 and isinstance(layer, KINDS) and layer.max_norm is not None:
            raise UserError(
                f"layer {name or 'Embedding'}: max_norm={layer.max_norm:g} changes the rows that a rank's samples use, "
                "so that ranks would have different weights; set num_ranks=1, or limit the norms of the rows that the "
                "layer returns (torch.renorm)"
            )
