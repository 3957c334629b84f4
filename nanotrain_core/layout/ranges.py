"""Where ranks may cut a parameter that they shard (ZeRO)."""

#: Where ranks share a parameter out, ranges begin at multiples of this many elements of the flattened block,
#: so that what is kept for a few neighbouring weights at once, as a quantized format's scale, is on one rank.
RANGE = 64
