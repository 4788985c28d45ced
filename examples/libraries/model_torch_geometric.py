# /// script
# dependencies = ["torch-geometric==2.8.1"]
# ///
"""torch-geometric: graphs of different sizes, joined to a single graph for each batch.

pyflyte run workflows/training.py training_wf --hp '{
    "dataset": "examples.libraries.model_torch_geometric:draw_graphs", "num_classes": 2,
    "collate": "examples.libraries.model_torch_geometric:join",
    "model": "examples.libraries.model_torch_geometric:GraphClassifier",
    "optimizer": "adamw", "learning_rate": 0.01, "batch_size": 16, "epochs": 2}'

Graphs differ in size, so `collate` joins the graphs to a single graph, whose rows are nodes and edges. Pooling needs
the number of each node's graph. The model gets these numbers as a separate argument.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

from flyte_ddp import on_demand


def join(samples: list[Any]) -> Any:
    graphs = Batch.from_data_list([Data(**graph) for graph, _ in samples])
    inputs = {"x": graphs.x, "edge_index": graphs.edge_index, "graph": graphs.batch}
    return inputs, torch.tensor([target for _, target in samples])


class GraphClassifier(nn.Module):
    def __init__(self, num_classes: int, input_shape: Any, width: int = 16) -> None:
        super().__init__()
        features = input_shape["x"][-1]
        self.first, self.second = GCNConv(features, width), GCNConv(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        states = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        logits: Tensor = self.head(global_mean_pool(states, graph))
        return logits


# What it is tried with.
def draw_graphs(_: str) -> Any:
    """Return rings of 4 to 9 nodes (class 1), and paths of 4 to 9 nodes (class 0)."""
    return on_demand([draw_graph(number) for number in range(64)], [draw_graph(number) for number in range(64, 80)])


def draw_graph(number: int) -> tuple[dict[str, Tensor], int]:
    """Return the node features and the edges of a graph, and the graph's class."""
    nodes, ring = 4 + number % 6, number % 2
    start = torch.arange(nodes - 1 + ring)
    edges = torch.stack([start, (start + 1) % nodes])
    edges = torch.cat([edges, edges.flip(0)], 1)
    return {"x": torch.bincount(edges[0], minlength=nodes)[:, None].float(), "edge_index": edges}, ring
