"""The storage of packed weights: 4-bit codes, two in a byte, and the scales of their blocks.

A row consists of the codes of 64 weights, in 32 bytes, followed by their scales:

| | scales of a row | bytes of a row | bits a weight |
|---|---|---|---|
| NVFP4 | 4, a byte each | 36 | 4.5 |
| NF4, blocks of 64, 32, 16 | 1, 2, 4, two bytes each | 34, 36, 40 | 4.25, 4.5, 5 |

Rows share nothing, so a range of rows of a weight can be stored, sent and updated by itself.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from nanotrain_core.api.torch import RANGE
from nanotrain_fp4_master.blocks import Format, in_triton, nonzero, on_grid, to_nearest
from nanotrain_fp4_master.noise import chunks
from nanotrain_fp4_master.pack import pack, unpack

#: Bytes of a row's codes.
CODES = RANGE // 2


class FourBits:
    """Weights in blocks of a format. See :class:`~nanotrain_core.precision.quantized_storage.Packing`."""

    def __init__(self, form: Format) -> None:
        self.form, self.name = form, f"{form.codec.__name__} in blocks of {form.block}"
        self.width = CODES + RANGE // form.block * form.codec.SCALE_BYTES
        self._pairs: dict[torch.device, torch.Tensor] = {}

    def rounded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return flat numbers, rounded to nearest, in bfloat16. Blocks that can be stored exactly stay.

        Such blocks were rounded earlier, possibly with another tensor scale: that of a rank's range, or of an
        earlier step. With the tensor scale of all these numbers, the smallest blocks would become 0.
        """
        result = torch.empty_like(numbers, dtype=torch.bfloat16)
        low, high = numbers.aminmax()
        form = self.form.fit(torch.maximum(-low, high).float())
        for begin, end in chunks(numbers):
            blocks = self._blocks(numbers[begin:end])
            kept = torch.where(self._can_hold(blocks), blocks, to_nearest(blocks, form))
            result[begin:end] = kept.view(-1)[: end - begin]
        return result

    def _can_hold(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [N, 1]: for each block [N, B], whether encoding and decoding it leaves it unchanged."""
        scales, codec = self.form.scales_of(blocks), self.form.codec
        stored = codec.from_bytes(codec.to_bytes(scales)).view(scales.shape)
        back = on_grid(self.form.nearest(blocks / nonzero(scales)), stored)
        return (back == blocks).all(dim=1, keepdim=True)

    def pairs_on(self, device: torch.device) -> torch.Tensor:
        """Return the two float32 numbers of every byte of codes, as one number of 8 bytes: [256], int64."""
        if device not in self._pairs:
            every = torch.arange(256, dtype=torch.uint8, device=device)
            self._pairs[device] = self.form.codec.from_codes(unpack(every)).view(torch.int64)
        return self._pairs[device]

    def pack(self, numbers_n: torch.Tensor) -> torch.Tensor:
        """Return rows of codes and scales."""
        self.pairs_on(numbers_n.device)  # so that a graph that unpacks the rows reads them, and makes none
        rows = numbers_n.new_empty(-(-len(numbers_n) // RANGE), self.width, dtype=torch.uint8)
        if in_triton(numbers_n, self.form):
            from nanotrain_fp4_master import triton_nvfp4

            triton_nvfp4.pack(numbers_n, rows)
            return rows
        for begin, end in chunks(numbers_n):
            self._write(numbers_n[begin:end], rows[begin // RANGE : -(-end // RANGE)])
        return rows

    def _write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        blocks = self._blocks(pad(numbers, (0, -len(numbers) % RANGE)))
        scales = self.form.scales_of(blocks)
        codes = self.form.codec.to_codes((blocks / nonzero(scales)).nan_to_num_(0.0))
        rows[:, :CODES] = pack(codes).view(-1, CODES)
        rows[:, CODES:] = self.form.codec.to_bytes(scales).view(len(rows), -1)

    def _blocks(self, numbers: torch.Tensor) -> torch.Tensor:
        return pad(numbers.float(), (0, -len(numbers) % self.form.block)).view(-1, self.form.block)

    def unpack(self, rows_UW: torch.Tensor) -> torch.Tensor:
        """Return the numbers in bfloat16, as :func:`~nanotrain_fp4_master.blocks.on_grid` rounds them."""
        if in_triton(rows_UW, self.form):
            from nanotrain_fp4_master import triton_nvfp4

            return triton_nvfp4.unpack(rows_UW)
        codec = self.form.codec
        stored = rows_UW[:, CODES:].reshape(-1, codec.SCALE_BYTES)
        pairs = self.pairs_on(rows_UW.device)
        numbers = pairs.index_select(0, rows_UW[:, :CODES].reshape(-1).int()).view(torch.float32)
        return numbers.view(-1, self.form.block).mul_(codec.from_bytes(stored)).bfloat16().view(-1)
