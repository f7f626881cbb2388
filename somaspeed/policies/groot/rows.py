"""The rows of the head's big tables that train: one embodiment's weights and the positions in use.

LeRobot's head keeps weights of 32 embodiments and 1024 position embeddings. A run trains one embodiment, so the
others get a gradient of zero; under AdamW only weight decay moves them. Here the live rows are parameters of their
own: the rest has no gradient, no optimizer state and no part in communication, and stays as it is in the module.
"""

from __future__ import annotations

import torch
from lerobot.policies.groot.groot_n1_7 import CategorySpecificLinear, GR00TN17ActionHead
from torch import Tensor, nn

# AdamW's decay w · (1 - lr · wd) leaves every float32 as it is below half the spacing of numbers next under 1.
NO_DECAY = 2.0**-25


class LiveRows:
    """The head's tables, cut to what trains.

    Attributes:
        parameters: the cut parameters by name, e.g. `….state_encoder.layer1.W[2]`; empty when the tables train whole.

    Args:
        module, prefix: the head inside the policy, and its name there.
        embodiment: which of the category-specific weights train.
        positions: how many position embeddings are in use.
        whole: train the tables whole, as LeRobot does: when weight decay would move the rows without gradient.
    """

    def __init__(
        self, module: GR00TN17ActionHead, prefix: str, embodiment: int, positions: int, whole: bool = False
    ) -> None:
        self.embodiment = embodiment
        self.parameters: dict[str, nn.Parameter] = {}
        self.tables: dict[str, tuple[nn.Parameter, slice | int]] = {}  # by name of the cut: table and its rows
        self.cut: dict[int, str] = {}  # by id of the table: name of its cut
        self.used = positions
        self.position_table = module.position_embedding.weight if module.config.add_pos_embed else None
        if whole:
            return
        for name, child in module.named_modules():
            if isinstance(child, CategorySpecificLinear):
                for key, table in child.named_parameters(recurse=False):
                    self.add(f"{prefix}.{name}.{key}", table, embodiment)
        if self.position_table is not None:
            self.add(f"{prefix}.position_embedding.weight", self.position_table, slice(0, positions))

    def add(self, name: str, table: nn.Parameter, rows: int | slice) -> None:
        if not table.requires_grad:
            return
        label = f"{name}[{rows if isinstance(rows, int) else f':{rows.stop}'}]"
        self.parameters[label] = nn.Parameter(table.detach()[rows].clone())
        self.tables[label] = (table, rows)
        self.cut[id(table)] = label

    def value(self, table: nn.Parameter, rows: int | slice) -> Tensor:
        """The live rows of `table`."""
        label = self.cut.get(id(table))
        return table[rows] if label is None else self.parameters[label]

    def weights(self, layer: CategorySpecificLinear) -> tuple[Tensor, Tensor]:
        """Weight [in, out] and bias [out] of the embodiment."""
        return self.value(layer.W, self.embodiment), self.value(layer.b, self.embodiment)

    def linear(self, layer: CategorySpecificLinear, x: Tensor) -> Tensor:
        weight, bias = self.weights(layer)
        return x @ weight + bias

    def positions(self, count: int) -> Tensor:
        """The first `count` position embeddings, [count, D]."""
        assert self.position_table is not None and count <= self.used
        return self.value(self.position_table, slice(0, self.used))[:count]

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the live rows into LeRobot's tables, for whoever runs or saves LeRobot's module."""
        for label, (table, rows) in self.tables.items():
            table[rows] = self.parameters[label]
