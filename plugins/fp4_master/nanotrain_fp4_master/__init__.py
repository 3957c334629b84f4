"""Low-bit master weights: the model computes with low-bit weights, and little is kept beside them.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import attrs

from nanotrain_core.api import (
    SAME_ON_RESUME,
    Component,
    Layout,
    Problem,
    Range,
    Recipe,
    Register,
    Role,
    StaysEager,
    Support,
    always_captured,
    divisibility_of,
    hookimpl,
)

__version__ = "0.1.0"

#: Supported block sizes of each format; the first is the default.
BLOCKS = {"nvfp4": (16,), "nf4": (64, 32, 16), "bf16": (1,)}


@attrs.define(frozen=True, kw_only=True)
class FP4MasterConfig:
    """``[precision] use = "fp4_master"``."""

    variant: Literal["residual", "eco", "remainder", "naive"] = "residual"
    """What is kept beside a weight: `residual` 8 bits of what rounding lost, `remainder` all 16 bits of it
    (bf16 only), `eco` nothing, but the optimizer's momentum carries it, `naive` nothing."""
    format: Literal["nvfp4", "nf4", "bf16"] | None = None
    """What weights are rounded to, for the model too. Unless said: `nvfp4`, and `bf16` for `remainder`."""
    block_size: int | None = attrs.field(default=None, validator=Range(0, 1024))
    """Weights with one scale: 16 of `nvfp4`; of `nf4` 64, 32 or 16."""
    packed: bool = True
    """Hold weights of four bits packed, 0.53 to 0.63 bytes each, and unpack them for each product; false: as
    bfloat16 numbers of the format, 2 bytes each, which is faster."""
    roles: tuple[Literal["column", "row", "replicated", "experts"], ...] = (
        "column",
        "row",
        "replicated",
        "experts",
    )
    """Matrices with these roles get the format and variant above. All else (norms, biases, embeddings, the
    head, routers) is kept as bfloat16 with a 16-bit remainder, which together are float32."""
    keep: tuple[str, ...] = ()
    """Patterns (`layers.0.*`) of parameters, or of modules around them, to keep so too."""

    @property
    def form(self) -> str:
        """The format in effect: ``format``, or the default of the variant if that is unset."""
        return self.format or ("bf16" if self.variant == "remainder" else "nvfp4")

    @property
    def weights(self) -> str:
        """Format and block size of low-bit weights as text, for messages and checkpoints."""
        return self.form if self.form == "bf16" else f"{self.form} in blocks of {self.block}"

    @property
    def block(self) -> int:
        """The block size in effect: ``block_size``, or the default of the format if that is unset."""
        return BLOCKS[self.form][0] if self.block_size is None else self.block_size


@attrs.define(frozen=True, kw_only=True)
class QLoRAConfig:
    """``[precision] use = "qlora"``, beside ``[[parallel]] use = "lora"``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "load_in_4bit": 'it is [precision] use = "qlora" itself',
        "bnb_4bit_quant_type": "frozen matrices are in NF4",
        "bnb_4bit_use_double_quant": "scales are bfloat16 numbers, which are not quantized again",
        "bnb_4bit_compute_dtype": "all computes in bfloat16",
        "bnb_4bit_quant_storage": "codes and scales are stored as bytes",
        "llm_int8_skip_modules": "it is keep, with patterns of this model's parameters, such as layers.0.*",
    }

    block_size: Literal[64, 32, 16] = attrs.field(default=64, metadata={SAME_ON_RESUME: True})
    """Weights with one scale, next to each other in a row of a matrix."""
    keep: tuple[str, ...] = attrs.field(default=(), metadata={SAME_ON_RESUME: True})
    """Patterns (`layers.0.*`) of parameters, or of modules around them, to keep in bfloat16. Embeddings, the
    head, norms, biases and routers are kept in any case."""


def kept(config: FP4MasterConfig | QLoRAConfig) -> Iterator[tuple[str, str]]:
    """Yield the patterns of ``keep``."""
    return ((f"keep.{number}", pattern) for number, pattern in enumerate(config.keep))


def check(recipe: Recipe, config: FP4MasterConfig, layout: Layout) -> Iterator[Problem]:
    """Reject unsupported formats and block sizes, an empty ``roles``, and ``eco`` without momentum."""
    sizes = BLOCKS[config.form]
    if config.variant == "remainder" and config.form != "bf16":
        text = (
            f"the remainder is of bfloat16: expected 'bf16' with variant = 'remainder', not '{config.form}'"
        )
        yield Problem("precision.format", text)
    if config.block not in sizes:
        text = f"{config.block} is no block size of {config.form}: {', '.join(map(str, sizes))}"
        if config.form == "bf16":
            text = f"{config.block} is no block size: bf16 has no blocks, leave it out"
        yield Problem("precision.block_size", text)
    if not config.roles:
        text = "no matrix would be low: expected at least one role, or use = 'bf16'"
        yield Problem("precision.roles", text)
    if config.variant == "eco" and "error_feedback" in recipe.optimizer.unsupported:
        text = f"'eco' has the momentum carry errors, which '{recipe.optimizer.use}' declares that it cannot"
        yield Problem("optimizer.use", f"{text}; expected another optimizer, or another precision.variant")
    betas = getattr(recipe.optimizer.config, "betas", (1.0,))
    if config.variant == "eco" and not betas[0]:
        yield Problem(
            "optimizer.betas", "'eco' carries errors in the first moment: expected betas[0] above 0"
        )
    if config.variant == "eco" and not getattr(recipe.optimizer.config, "momentum", 1.0):
        yield Problem("optimizer.momentum", "'eco' carries errors in the momentum: expected one above 0")


def check_rows(recipe: Recipe, config: QLoRAConfig, layout: Layout) -> Iterator[Problem]:
    """Reject rows that a layout leaves without whole blocks, of those that the model's config tells.

    ``check_model`` sees all rows, and which of them ``keep`` has patterns for.
    """
    for extent in () if config.keep else divisibility_of(recipe.model.config) or ():
        dim = "etp" if Role.EXPERTS in extent.roles else "tp"
        degree, row, units = layout.degree(dim), extent.row, extent.units
        if units % degree or not row // degree % config.block_size:
            continue
        whole = [n for n in range(1, degree) if not units % n and not row // n % config.block_size]
        expected = [f"{size}" for size in BLOCKS["nf4"] if not row // degree % size][:1]
        expected += [f"{dim} = {whole[-1]}"] if whole else []
        expected += ["patterns of these matrices in precision.keep"]
        yield Problem(
            "precision.block_size",
            f"{config.block_size} neighbors in a row share a scale, but {units} {extent.what} make rows of "
            f"{row}, of which {dim} = {degree} leaves {row // degree} on a rank; expected "
            f"{' or '.join(expected)}",
        )


def supports_for(config: FP4MasterConfig) -> Mapping[str, Support]:
    """Return the properties, most by their names in the conformance harness, that it does not have."""
    lacks = set()
    if config.packed and config.form != "bf16":  # a wrapper shards packed weights only if they are frozen
        lacks.add("dtensors")
    if config.variant == "naive":  # the baseline for comparison: rounding errors are lost
        lacks.add("keeps_small_updates")
    if config.variant == "eco" and config.form != "bf16":  # at random, so that errors are zero in the mean
        lacks.add("rounds_to_nearest")
    return dict.fromkeys(lacks, Support.UNSUPPORTED)


def stays_eager(recipe: Recipe, config: FP4MasterConfig, layout: Layout) -> Iterator[StaysEager]:
    """Yield that layers with packed weights are not compiled."""
    if config.packed and config.form != "bf16":
        yield StaysEager(Role.BLOCK, "packed weights are unpacked for each product, which no graph holds")


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register ``fp4_master`` and ``qlora``."""
    register(
        Component(
            name="fp4_master",
            config=FP4MasterConfig,
            factory="nanotrain_fp4_master.precision:FP4Master",
            summary="weights in NVFP4, NF4 or bfloat16, with 16, 8 or no additional master bits",
            check=check,
            check_model="nanotrain_fp4_master.checks:check_model",
            stays_eager=stays_eager,
            # Losses of weights in four bits are a few percent from float32's, with any master.
            supports={"follows_float32": Support.PARTIAL},
            supports_for=supports_for,
            reads_modules=kept,
        )
    )
    register(
        Component(
            name="qlora",
            config=QLoRAConfig,
            factory="nanotrain_fp4_master.qlora:QLoRA",
            summary="bf16 with the frozen matrices held in NF4, for adapters of lora to train beside",
            requires={"frozen_weights"},
            supports={"follows_float32": Support.PARTIAL},  # weights in four bits lose some percent
            example={"block_size": 16},
            check=check_rows,
            check_model="nanotrain_fp4_master.qlora:check_model",
            reads_modules=kept,
            cuda_graphs=always_captured,
        )
    )
