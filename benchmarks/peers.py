"""The other side: Llama in plain PyTorch and the training loop one writes for it, alone or under torch's DDP.

Written to be fast with what PyTorch offers: SDPA, fused AdamW, cached RoPE tables, gradients set to
None, and under DDP no sync but in the last microbatch and gradients that are views of the buckets
(``static_graph`` fails an internal assertion of torch 2.13 where the first microbatch does not sync).
It shares no code with the engine, only the batches and the numbers of the recipe.

Shapes: B batch, S sequence, D width, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ours import Microbatches, batches
from nanotrain_core.recipe.tree import Recipe


class Llama(nn.Module):
    """Tokens [B, S] to logits [B, S, V]."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        half = torch.arange(0, config.width // config.heads, 2) / (config.width // config.heads)
        angles = torch.outer(torch.arange(length), config.rope_theta**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(lambda module: self._initialize(module, config.init_std))

    @staticmethod
    def _initialize(module: nn.Module, std: float) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (  # [B, H, S, K]
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Loop:
    """A training loop: forward, loss, backward per microbatch, then clip and step."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        self.model, self.config = model, recipe.optimizer.config
        self.bf16 = recipe.precision.use == "bf16"
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        c = self.config
        self.optimizer = torch.optim.AdamW(
            groups, lr=c.lr, betas=c.betas, eps=c.eps, weight_decay=c.weight_decay, fused=True
        )

    def step(self, microbatches: Microbatches) -> torch.Tensor:
        """Take one optimizer step and return the mean loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index, (tokens, targets) in enumerate(microbatches):
            with self._sync(last=index == len(microbatches) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    logits = self.model(tokens)
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(microbatches)
                loss.backward()
            total += self.plain(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        return total

    @staticmethod
    def plain(loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as a plain tensor."""
        return loss

    def _sync(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()


def peer(recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what trains for so many steps more: a plain loop, on several ranks under DDP."""
    torch.manual_seed(recipe.run.seed)
    model: nn.Module = Llama(recipe.model.config, recipe.batch.length)
    if recipe.run.ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return training(Loop(recipe, model), recipe, rank)


def training(loop: Loop, recipe: Recipe, rank: int) -> Callable[[int], object]:
    """Return what takes so many steps more of ``loop``, on this rank's batches."""
    stream = batches(recipe, rank)

    def advance(steps: int) -> None:
        for _ in range(steps):
            loop.step(next(stream))

    return advance
