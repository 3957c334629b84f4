"""What is compared with what, and what counts as passed. Torch-free."""

from __future__ import annotations

from pathlib import Path

import attrs

from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe

RECIPE = Path(__file__).with_name("llama.toml")

#: Microbatches per rank and optimizer step.
ACCUMULATE = 2


@attrs.define(frozen=True, kw_only=True)
class Case:
    """One race of the engine against a peer, on the same model and the same batches."""

    name: str
    peer: str
    """What the other side is, for the table."""
    ranks: int = 1
    threads: int = 1
    """Of each rank."""
    precision: str = "fp32"
    bar: float = 1.0
    """Lowest median of tokens/s over the peer's tokens/s that passes."""

    def recipe(self) -> Recipe:
        """Return the recipe of both sides."""
        recipe = load_recipe(RECIPE, overrides=[f'precision.use = "{self.precision}"'], ranks=self.ranks)
        rows = recipe.batch.microbatch * ACCUMULATE * self.ranks
        return attrs.evolve(recipe, batch=attrs.evolve(recipe.batch, sequences=rows))


PLAIN = "PyTorch loop"

CASES = (
    Case(name="fp32-1-thread", peer=PLAIN),
    Case(name="fp32-2-threads", peer=PLAIN, threads=2),
    Case(name="bf16-1-thread", peer=f"{PLAIN}, autocast", precision="bf16"),
    Case(name="bf16-2-threads", peer=f"{PLAIN}, autocast", precision="bf16", threads=2),
    Case(name="ddp-2-ranks", peer="torch DDP", ranks=2, bar=1.1),
)
