"""Multi-head latent attention: keys and values of all heads are computed from one small latent.

Shapes: B batch, S sequence, T tokens so far, D width, R latent rank, H heads, K size of a query and key head,
    N of its elements without position and P with, V size of a value head, C = R + P cached elements per
    token. A wrapper may leave this rank some of the heads, and pass the block a part of the sequence: the
    outputs of COLUMN and SHARED have H and S as attention sees them.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 19.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.api import Role, tag
from nanotrain_core.api.torch import LayerCache, Ops, RMSNorm, Rotation, dequantize
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.yarn import softmax_scale


class LatentAttention(nn.Module):
    """Causal attention; queries are computed from their own latent if ``q_rank`` is set."""

    def __init__(self, config: DeepSeekConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops, self.scale = config, ops, softmax_scale(config)
        D, H, K, R = config.width, config.heads, config.qk_size, config.kv_rank
        keys_and_values = config.nope_size + config.value_size
        if config.q_rank:
            self.q_a = tag(nn.Linear(D, config.q_rank, bias=False), Role.REPLICATED)
            self.q_a_norm = tag(RMSNorm(config.q_rank, eps=config.norm_eps, ops=ops), Role.NORM)
            self.q_b = tag(nn.Linear(config.q_rank, H * K, bias=False), Role.COLUMN, unit=K)
        else:
            self.q = tag(nn.Linear(D, H * K, bias=False), Role.COLUMN, unit=K)
        self.kv_a = tag(nn.Linear(D, R + config.rope_size, bias=False), Role.REPLICATED)
        self.kv_a_norm = tag(RMSNorm(R, eps=config.norm_eps, ops=ops), Role.NORM)
        self.kv_b = tag(nn.Linear(R, H * keys_and_values, bias=False), Role.COLUMN, unit=keys_and_values)
        self.k_shared = tag(nn.Identity(), Role.SHARED)
        self.o = tag(nn.Linear(H * config.value_size, D, bias=False), Role.ROW, unit=config.value_size)

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos_sin: Rotation,
        cache: LayerCache | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Both layers that read x are called one after the other: a precision may quantize x only once.
        latent_of_q, latent_of_kv = self.q_a(x_BSD) if self.config.q_rank else x_BSD, self.kv_a(x_BSD)
        q_BSHK = self._queries(latent_of_q, cos_sin)
        if cache is not None:
            y_BSHV = self._attend_to_latents(q_BSHK, latent_of_kv, cos_sin, cache)
        else:
            k_BSHK, v_BSHV = self._keys_and_values(latent_of_kv, cos_sin)
            documents = () if starts_BS is None else (starts_BS,)
            y_BSHV = self.ops.attention(q_BSHK, k_BSHK, v_BSHV, self.scale, *documents)
        y_BSD: torch.Tensor = self.o(y_BSHV.flatten(2))
        return y_BSD

    def _queries(self, latent: torch.Tensor, cos_sin: Rotation) -> torch.Tensor:
        """Compute queries from the output of q_a, or from x without q_a."""
        c = self.config
        q = self.q_b(self.q_a_norm(latent)) if c.q_rank else self.q(latent)
        q_BSHN, q_BSHP = q.unflatten(-1, (-1, c.qk_size)).split((c.nope_size, c.rope_size), dim=-1)
        return torch.cat((q_BSHN, self.ops.rope(q_BSHP, *cos_sin)), dim=-1)

    def _keys_and_values(self, latent: torch.Tensor, cos_sin: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys and values from the output of kv_a.

        The rotary key has one head, which is joined with the others only after it entered their region.
        """
        c = self.config
        latent_BSR, rotary_BSP = torch.split(latent, [c.kv_rank, c.rope_size], dim=-1)
        kv = self.kv_b(self.kv_a_norm(latent_BSR)).unflatten(-1, (-1, c.nope_size + c.value_size))
        k_BSHN, v_BSHV = kv.split((c.nope_size, c.value_size), dim=-1)
        k_BS1P = self.ops.rope(self.k_shared(rotary_BSP).unsqueeze(2), *cos_sin)
        # A copy of the values: a view would keep the adjacent keys alive until the backward pass.
        k_BSHK = torch.cat((k_BSHN, k_BS1P.expand(-1, -1, k_BSHN.shape[2], -1)), dim=-1)
        return k_BSHK, v_BSHV.contiguous()

    def _attend_to_latents(
        self, q_BSHK: torch.Tensor, latent: torch.Tensor, cos_sin: Rotation, cache: LayerCache
    ) -> torch.Tensor:
        """Attend to all tokens so far, of which C = R + P elements are cached: the latent and the rotary key.

        For a latent c, kv_b computes each head's key W^UK c and value W^UV c. A score is q . W^UK c = (W^UK^T
        q) . c, so W^UK is applied to the queries and W^UV after the weighted sum: one key (c, rotary key) and
        one value c serve all heads, as in multi-query attention. Source: DeepSeek-V2, section 2.1.2, where
        W^UK is absorbed into W^Q and W^UV into W^O.
        """
        c = self.config
        latent_BSR, rotary_BSP = torch.split(latent, [c.kv_rank, c.rope_size], dim=-1)
        whole_BSC = self.k_shared(torch.cat((self.kv_a_norm(latent_BSR), rotary_BSP), dim=-1))
        latent_BSR, rotary_BSP = torch.split(whole_BSC, [c.kv_rank, c.rope_size], dim=-1)
        rotary_BS1P = self.ops.rope(rotary_BSP.unsqueeze(2), *cos_sin)
        (kept_BTC,) = cache.extend(torch.cat((latent_BSR, rotary_BS1P.squeeze(2)), dim=-1))
        up_HMR = torch.unflatten(dequantize(self.kv_b.weight), 0, (-1, c.nope_size + c.value_size))
        up_HNR, up_HVR = torch.split(up_HMR, [c.nope_size, c.value_size], dim=1)
        q_BSHN, q_BSHP = torch.split(q_BSHK, [c.nope_size, c.rope_size], dim=-1)
        q_BSHC = torch.cat((torch.einsum("bshn,hnr->bshr", q_BSHN, up_HNR), q_BSHP), dim=-1)
        k_BT1C = kept_BTC.unsqueeze(2)
        y_BSHR = self.ops.attention(q_BSHC, k_BT1C, k_BT1C[..., : c.kv_rank], self.scale)
        return torch.einsum("bshr,hvr->bshv", y_BSHR, up_HVR)
