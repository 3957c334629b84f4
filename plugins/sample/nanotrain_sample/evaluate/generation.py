"""What a task has the model generate: a prompt with the strings that end its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs

from nanotrain_core.api import NanotrainError, did_you_mean
from nanotrain_core.api.text import EncodesSpecial, TextCodec
from nanotrain_sample.generate import How, Prompt, Writer
from nanotrain_sample.replica import rounds
from nanotrain_sample.source import ends_of

#: Tokens that are generated where a task does not say how many: as many as lm_eval's own models generate.
DEFAULT_TOKENS = 256
#: What else stands for ``max_gen_toks``; the first that is given counts, as in lm_eval.
MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
#: Arguments that change nothing where they have this value.
NEUTRAL: Mapping[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
KNOWN = ("until", *MOST_TOKENS, "do_sample", "temperature", "top_k", "top_p", *NEUTRAL)


@attrs.define(frozen=True)
class Generation:
    """A prompt, and the strings before the first of which its text ends."""

    prompt: Prompt
    until: tuple[str, ...]

    def cut(self, text: str) -> str:
        """Return ``text`` up to the first of the strings.

        >>> Generation(Prompt((1,), How(vocab=2)), ("Q:", "\\n")).cut("4, as I said.\\nQ: 3 + 3?")
        '4, as I said.'
        """
        return text[: min((at for stop in self.until if (at := text.find(stop)) >= 0), default=None)]


def generation_of(
    context: str,
    arguments: Mapping[str, Any],
    codec: TextCodec,
    length: int,
    where: str,
    prefix: Sequence[int] = (),
    ends: Iterable[int] = (),
    bos: int | None = None,
) -> Generation:
    """Return what lm_eval asks for.

    Args:
        context: what the model continues; of a long one the end.
        arguments: the task's ``generation_kwargs``.
        codec: of the model.
        length: tokens that the model reads at once.
        where: begins error messages.
        prefix: tokens that stand before every text, such as BOS.
        ends: tokens that end a text, beside the end-of-text token of ``codec``.
        bos: the tokenizer's BOS, if it has one that stands before no text.

    Raises:
        NanotrainError: an argument has no counterpart here, or the text may be as long as the
            model reads.
    """
    for name, value in arguments.items():
        if name not in KNOWN:
            raise NanotrainError(
                f"{where}: generation_kwargs.{name} is not supported{did_you_mean(name, KNOWN)}; "
                f"expected some of {', '.join(KNOWN)}"
            )
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise NanotrainError(
                f"{where}: generation_kwargs.{name} = {value}: only {NEUTRAL[name]} is supported"
            )
    given = [name for name in MOST_TOKENS if arguments.get(name) is not None]
    tokens = int(_number(arguments, given[0], 1, math.inf, where)) if given else DEFAULT_TOKENS
    if tokens >= length:
        raise NanotrainError(
            f"{where}: texts of up to {tokens} tokens (max_gen_toks in its generation_kwargs, "
            f"{DEFAULT_TOKENS} if unset), but the model reads {length} at once, the question included: "
            "expected fewer, or a larger --length"
        )
    stops = arguments.get("until") or ()
    # An empty string is in every text; lm_eval leaves it out too.
    until = tuple(stop for stop in ([stops] if isinstance(stops, str) else stops) if stop)
    how = How(
        tokens=tokens,
        temperature=_temperature(arguments, where),
        top_k=int(_number(arguments, "top_k", 0, math.inf, where, 0)),
        top_p=_number(arguments, "top_p", 0, 1, where, 1),
        vocab=codec.vocab_size,
        ends=ends_of(codec, (*ends, *(special_token(codec, stop) for stop in until))),
    )
    question = [*prefix, *codec.encode(context)][tokens - length :] or [empty_context(codec, prefix, bos)]
    return Generation(Prompt(tuple(question), how), until)


def special_token(codec: TextCodec, text: str) -> int | None:
    """Return the special token that ``text`` names; None: none. No decoded text contains it."""
    tokens = _named(codec.encode_special, text) if isinstance(codec, EncodesSpecial) else []
    return tokens[0] if len(tokens) == 1 and text.strip() and not codec.decode(tokens) else None


@cache
def _named(encode_special: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the tokens: a tokenizer may take a second for it, and all questions have the same strings."""
    return encode_special(text)


def empty_context(codec: TextCodec, prefix: Sequence[int], bos: int | None) -> int:
    """Return what stands for an empty context: BOS, else the token that ends documents, or a line's end.

    As in lm_eval's own models of Hugging Face, BOS stands there even if the tokenizer puts it before no text.
    """
    if prefix:
        return prefix[-1]
    if bos is not None:
        return bos
    return codec.encode("\n")[0] if codec.separator is None else codec.separator


def _temperature(arguments: Mapping[str, Any], where: str) -> float:
    """Return 0 for greedy decoding: without ``do_sample`` the temperature decides, as in lm_eval."""
    samples = arguments.get("do_sample")
    if samples is not None and not samples:
        return 0.0
    return _number(arguments, "temperature", 0, math.inf, where, 0 if samples is None else 1)


def _number(
    arguments: Mapping[str, Any], name: str, low: float, high: float, where: str, default: float | None = None
) -> float:
    value = default if arguments.get(name) is None else arguments[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        most = "" if high == math.inf else f" to {high}"
        raise NanotrainError(
            f"{where}: generation_kwargs.{name} = {value!r}: expected a number from {low}{most}"
        )
    return float(value)


def generate(writer: Writer, asked: Sequence[Generation], codec: TextCodec) -> Iterator[str]:
    """Yield the text of each, on every rank and in their order. Collective: to be exhausted.

    Args:
        writer: of this rank.
        asked: the same on all ranks.
        codec: decodes what was written, on every rank: all have to know where a text ends.
    """
    prompts = [each.prompt for each in asked]
    for numbers in rounds(len(asked), writer.replica.count):
        ends = partial(_stops, asked[numbers[writer.replica.index]], codec)
        for text in writer.write_round(prompts, numbers, ends=ends):
            wanted = asked[text.number]
            known = [token for token in text.tokens if token not in wanted.prompt.how.ends]
            yield wanted.cut(codec.decode(known))


def _stops(asked: Generation, codec: TextCodec, tokens: Sequence[int]) -> bool:
    """Return whether one of the strings is among what was written."""
    text = codec.decode(tokens) if asked.until else ""
    return any(stop in text for stop in asked.until)
