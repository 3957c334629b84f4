"""The decoder of GPT-2, Llama, Mistral and Qwen, as plain single-device PyTorch.

Shapes: B batch, S sequence, D width, H heads (query, or key and value), K head size, F feed-forward, V
    vocabulary. A wrapper may leave this rank some of the heads, so H is always read from a tensor.

Sources: Radford et al. 2019 (GPT-2); Touvron et al., arXiv 2302.13971 (Llama); Ainslie et al.,
arXiv 2305.13245 (grouped-query attention); Yang et al., arXiv 2505.09388 (Qwen3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.contracts import Initializer, ModelPart, PartOutput
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.cache import LayerCache
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.head import Head
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH_OPS, Ops, expect_window
from nanotrain_core.models.rope import Rotation, rope_frequencies, rope_rotation
from nanotrain_core.models.window import tokens_seen
from nanotrain_core.pipeline.actions import Costs, Part


class Transformer:
    """Dimensions and parts of the model. See :class:`~nanotrain_core.contracts.Model`."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config.resolved()
        self.layers = config.layers
        self.vocab_size = config.vocab
        self.max_length = config.max_length or None
        self.loss_weights: Mapping[str, float] = {"lm": 1.0}

    @property
    def caches(self) -> bool:
        """False with ``dynamic`` scaling: each new token changes the rotation of all earlier keys."""
        scaling = self.config.rope_scaling
        return scaling is None or scaling.type != "dynamic"

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return the layers of ``part`` on ``meta``, with embedding and head where it has them."""
        with torch.device("meta"):
            return TransformerPart(self.config, part, ops)

    def change(self, config: TransformerConfig, parts: Iterable[nn.Module]) -> None:
        """Apply RoPE's base and scaling of ``config``: angles are computed in every forward pass."""
        self.config = config.resolved()
        for module in (module for part in parts for module in part.modules()):
            if isinstance(module, TransformerPart):
                module.config = self.config

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the number of target tokens."""
        return {"lm": batch.target_tokens()}

    def flops(self, length: int) -> Costs:
        """Return 3 times the forward pass: 2 FLOPs per weight of a matrix product, and causal attention.

        The head is a matrix product, the embedding a lookup at no cost. A token attends to
        ``length`` / 2 others on average, in a window to fewer: 2 FLOPs for each element of their keys and of
        their values.
        """
        c = self.config
        attention = 2 * c.width * c.head_size * (c.heads + c.kv_heads)
        ffn = (3 if c.activation == "swiglu" else 2) * c.width * c.ffn
        seen = (tokens_seen(length, c.window_of(layer)) for layer in range(c.layers))
        scores_and_values = (2 * each * c.heads * (c.head_size + c.head_size) for each in seen)
        layers = tuple(3.0 * (2 * (attention + ffn) + each) for each in scores_and_values)
        return Costs(layers=layers, head=3.0 * 2 * c.vocab * c.width)


class TransformerPart(ModelPart):
    """Consecutive layers, numbered as in the whole model.

    The last part of a tied model needs the embedding table for the head. It holds its own copy when
    the first part is on another rank, under the same name.
    """

    def __init__(self, config: TransformerConfig, part: Part, ops: Ops) -> None:
        super().__init__()
        self.config, self.part = config, part
        if part.has_embedding or (part.has_head and config.tied):
            self.embed = tag(nn.Embedding(config.vocab, config.width), Role.VOCAB)
        if part.has_embedding and config.positions == "learned":
            self.positions = tag(Positions(config), Role.POSITION)
        if any(map(config.window_of, range(part.first, part.last))):
            expect_window(ops)
        self.layers = nn.ModuleDict(
            {str(number): tag(self.block(number, ops), Role.BLOCK) for number in range(part.first, part.last)}
        )
        if part.has_head:
            self.norm = _norm(config, ops)
            self.head = tag(Head(config.vocab, config.width, tied=config.tied, ops=ops), Role.HEAD)

    def block(self, number: int, ops: Ops) -> nn.Module:
        """Return layer ``number``. A model with other layers overrides this, and :meth:`run_layers`."""
        return Block(self.config, ops, self.config.window_of(number))

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Run tokens [B, S], or hidden states [B, S, D] of the previous part, through the layers."""
        x_BSD = self._embed(inputs, batch) if self.part.has_embedding else inputs
        x_BSD, losses = self.run_layers(x_BSD, self._rotation(batch, x_BSD), batch)
        if not self.part.has_head:
            return PartOutput(x_BSD, losses)
        # The head receives the table as an argument: `to_empty` would untie a shared Parameter.
        table_VD = self.embed.weight if self.config.tied else None
        # With targets: ops.linear_cross_entropy, which is models/cross_entropy.py.
        output = self.head(self.norm(x_BSD), batch.targets, table_VD)
        return PartOutput(output) if batch.targets is None else PartOutput(None, {"lm": output, **losses})

    def run_layers(
        self, x_BSD: torch.Tensor, cos_sin: Rotation | None, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return hidden states after the layers, and the sums of further loss terms: here there are none."""
        for number, layer in self.layers.items():
            x_BSD = layer(x_BSD, cos_sin, batch.cache_of(number), batch.document_starts)
        return x_BSD, {}

    def _embed(self, tokens_BS: torch.Tensor, batch: Batch) -> torch.Tensor:
        end, limit = batch.start + tokens_BS.shape[1], self.config.max_length
        if limit and end > limit:
            raise ValueError(f"a sequence of {end} tokens exceeds the model's max_length = {limit}")
        x_BSD: torch.Tensor = self.embed(tokens_BS)
        if self.config.positions != "learned":
            return x_BSD
        positions: torch.Tensor = self.positions(batch.start, end, batch.document_positions)
        return x_BSD + positions

    def _rotation(self, batch: Batch, like: torch.Tensor) -> Rotation | None:
        """Return RoPE's angles, which continue across documents: scores depend on differences alone."""
        if self.config.positions != "rope":
            return None
        c, length = self.config, batch.tokens.shape[1]
        inv_freq_P = rope_frequencies(
            c.head_size, c.rope_theta, c.rope_scaling, length=batch.length, device=like.device
        )
        magnitude = c.rope_scaling.magnitude if c.rope_scaling else 1.0
        return rope_rotation(length, inv_freq_P, like=like, magnitude=magnitude, start=batch.start)

    def initializer(self, name: str) -> Initializer:
        """Return ones for norms, zeros for biases, and a normal for matrices.

        Matrices that write to the residual stream have a smaller standard deviation, so that its variance
        does not grow with the number of layers (GPT-2, section 2.3).
        """
        if name.endswith("bias"):
            return Initializer("constant", 0.0)
        if name.endswith("norm.weight"):
            return Initializer("constant", 1.0)
        if name.endswith(("attn.o.weight", "ffn.down.weight")):
            return Initializer("normal", self.config.init_std / math.sqrt(2 * self.config.layers))
        return Initializer("normal", self.config.init_std)


class Block(nn.Module):
    """One layer: attention, then the feed-forward layer, each adding to the residual stream."""

    def __init__(self, config: TransformerConfig, ops: Ops, window: int | None = None) -> None:
        super().__init__()
        self.attn_norm = _norm(config, ops)
        self.attn = Attention(config, ops, window)
        self.ffn_norm = _norm(config, ops)
        self.add_feed_forward(config, ops)

    def add_feed_forward(self, config: TransformerConfig, ops: Ops) -> None:
        """Build the feed-forward layer. A layer of another kind overrides this, and ``forward``."""
        swiglu = config.activation == "swiglu"
        self.ffn = (
            SwiGLU(config.width, config.ffn, ops, bias=bool(config.ffn_bias)) if swiglu else GELU(config)
        )

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos_sin: Rotation | None,
        cache: LayerCache | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), cos_sin, cache, starts_BS)
        out_BSD: torch.Tensor = x_BSD + self.ffn(self.ffn_norm(x_BSD))
        return out_BSD


class Attention(nn.Module):
    """Causal attention with at most as many key and value heads as query heads, perhaps in a window."""

    def __init__(self, config: TransformerConfig, ops: Ops, window: int | None = None) -> None:
        super().__init__()
        D, K = config.width, config.head_size
        self.head_size, self.ops, self.window = K, ops, window
        bias = bool(config.attention_bias)
        self.q = tag(nn.Linear(D, config.heads * K, bias=bias), Role.COLUMN, unit=K)
        self.k = tag(nn.Linear(D, config.kv_heads * K, bias=bias), Role.COLUMN, unit=K, grouped=True)
        self.v = tag(nn.Linear(D, config.kv_heads * K, bias=bias), Role.COLUMN, unit=K, grouped=True)
        self.o = tag(nn.Linear(config.heads * K, D, bias=bool(config.output_bias)), Role.ROW, unit=K)
        self.q_norm, self.k_norm = (
            tag(RMSNorm(K, eps=config.norm_eps, ops=ops), Role.INNER) if config.qk_norm else None
            for _ in range(2)
        )

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos_sin: Rotation | None,
        cache: LayerCache | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = (-1, self.head_size)
        q_BSHK = self.q(x_BSD).unflatten(-1, heads)
        k_BSHK = self.k(x_BSD).unflatten(-1, heads)
        v_BSHK = self.v(x_BSD).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSHK = self.q_norm(q_BSHK), self.k_norm(k_BSHK)
        if cos_sin is not None:
            q_BSHK, k_BSHK = self.ops.rope(q_BSHK, *cos_sin), self.ops.rope(k_BSHK, *cos_sin)
        if cache is not None:
            # Documents begin at places of the whole text, so of a text with them all keys are kept.
            kept = self.window if starts_BS is None else None
            k_BSHK, v_BSHK = cache.extend(k_BSHK, v_BSHK, window=kept)
        window = () if self.window is None else (self.window,)
        more = (None, starts_BS, *window) if window or starts_BS is not None else ()
        y_BSHK = self.ops.attention(q_BSHK, k_BSHK, v_BSHK, *more)
        y_BSD: torch.Tensor = self.o(y_BSHK.flatten(2))
        return y_BSD


class GELU(nn.Module):
    """Feed-forward layer of GPT-2, with the tanh form of GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = tag(nn.Linear(config.width, config.ffn, bias=bool(config.ffn_bias)), Role.COLUMN)
        self.down = tag(nn.Linear(config.ffn, config.width, bias=bool(config.ffn_bias)), Role.ROW)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y_BSD: torch.Tensor = self.down(F.gelu(self.up(x_BSD), approximate="tanh"))
        return y_BSD


class Positions(nn.Module):
    """A learned vector for each position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.max_length, config.width))

    def forward(self, start: int, end: int, places_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Return the vectors [S, D] of positions ``start`` to ``end`` - 1, or [B, S, D] of those given."""
        return self.weight[start:end] if places_BS is None else F.embedding(places_BS, self.weight)


def _norm(config: TransformerConfig, ops: Ops) -> nn.Module:
    if config.norm == "rmsnorm":
        return tag(RMSNorm(config.width, eps=config.norm_eps, ops=ops), Role.NORM)
    return tag(nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias), Role.NORM)
