"""The other side on a GPU: Llama and GPT-2 in plain PyTorch, and the loop that one writes for them.

Float32 weights under ``torch.autocast`` in bfloat16, as nanoGPT trains; SDPA; fused AdamW; batches copied
from pinned memory; no number read from the device. The loss is part of the model, so that ``torch.compile``
of the whole has it in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.ours import Microbatches, batches
from benchmarks.peers import Llama
from nanotrain_core.recipe.tree import Recipe


class GPT(nn.Module):
    """GPT-2: tokens [B, S] to logits [B, S, V], the vocabulary as it is."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.max_length, config.width)
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GPTBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.attn_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.ffn_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x)), approximate="tanh"))


class WithLoss(nn.Module):
    """Tokens and targets [B, S] to their mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion: Callable[..., torch.Tensor] = F.cross_entropy

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.model(tokens).flatten(0, 1), targets.flatten())

    def compile_layers(self, backend: str) -> None:
        """Compile each layer, and the loss, by itself."""
        for layer in self.model.layers:  # type: ignore[union-attr]
            layer.compile(backend=backend)
        self.criterion = torch.compile(F.cross_entropy, backend=backend)


class NanoGPT(nn.Module):
    """nanoGPT's model, its vocabulary padded to a multiple of 64 as its ``train.py`` does."""

    def __init__(self, module: Any, recipe: Recipe) -> None:
        super().__init__()
        sizes = recipe.model.config
        self.model = module.GPT(
            module.GPTConfig(
                block_size=sizes.max_length,
                vocab_size=-(-sizes.vocab // 64) * 64,
                n_layer=sizes.layers,
                n_head=sizes.heads,
                n_embd=sizes.width,
                dropout=0.0,
                bias=sizes.bias,
            )
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        _, loss = self.model(tokens, targets)
        return loss  # type: ignore[no-any-return]


def model_of(recipe: Recipe, device: str = "cpu") -> WithLoss:
    """Return the recipe's model in plain PyTorch, its weights drawn on ``device``: a CPU takes 10 s for 1B.

    Raises:
        NotImplementedError: there is none.
    """
    torch.manual_seed(recipe.run.seed)
    config = recipe.model.config
    if recipe.model.use != "transformer":
        raise NotImplementedError(f"there is no model '{recipe.model.use}' in plain PyTorch")
    with torch.device(device):
        return WithLoss(GPT(config) if config.positions == "learned" else Llama(config, recipe.batch.length))


def use_torchao(model: WithLoss, recipe: str, *, emulate: bool = False) -> None:
    """Let torchao compute the linear layers of the blocks in FP8, by a recipe of its: rowwise, tensorwise."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(config, "emulate", True)
    for layer in model.model.layers:  # type: ignore[union-attr]
        convert_to_float8_training(layer, config=config)


class Loop:
    """Forward, loss and backward of each microbatch, then clip and step."""

    def __init__(self, model: nn.Module, recipe: Recipe, device: str, *, compiled: str = "") -> None:
        self.device, config = device, recipe.optimizer.config
        self.parameters = list(model.parameters())
        self.clip = config.clip_norm
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        backend = "inductor" if device == "cuda" else "aot_eager"
        self.loss: Callable[..., torch.Tensor] = model
        if compiled == "whole":
            self.loss = torch.compile(model, backend=backend)
        elif compiled == "layers":
            model.compile_layers(backend)  # type: ignore[operator]
        self.stream = batches(recipe, 0)

    def advance(self, steps: int) -> None:
        """Train so many steps more."""
        for microbatches in self._drawn(steps):
            self.optimizer.zero_grad(set_to_none=True)
            for tokens, targets in microbatches:
                with torch.autocast(self.device, torch.bfloat16):
                    loss = self.loss(tokens, targets) / len(microbatches)
                loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.optimizer.step()

    def _drawn(self, steps: int) -> Iterator[Microbatches]:
        for _ in range(steps):
            yield [(self._moved(tokens), self._moved(targets)) for tokens, targets in next(self.stream)]

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.device == "cpu" else x.pin_memory().to(self.device, non_blocking=True)
