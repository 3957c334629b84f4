"""``nanotrain sample PATH --prompt TEXT``: continue prompts with the weights of a run or a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import (
    DataError,
    NanotrainError,
    Resolution,
    load_plugins,
    plugin_arguments,
    positive_int,
    real_number,
    unsigned_int,
)
from nanotrain_core.api.text import EncodesSpecial, HasConversations
from nanotrain_sample.options import add_layout_options, add_weights

if TYPE_CHECKING:
    from nanotrain_core.api.text import TextCodec
    from nanotrain_sample.generate import How
    from nanotrain_sample.source import Source

#: What is continued where no prompt is given.
NO_PROMPT = "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_weights(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated; - reads it from standard input (default: an empty line)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message; the answer ends with its turn (runs on [data] use = 'chat', "
        "and Hugging Face folders with a chat template)",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: the system's message before each prompt"
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="encode special tokens in prompts, such as <|im_start|>, as these tokens (default: as text)",
    )
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=200,
        metavar="N",
        help="maximum number of tokens to generate (default: 200)",
    )
    parser.add_argument(
        "--temperature",
        type=real_number("0 or a number above it", lambda value: value >= 0),
        default=0.8,
        metavar="T",
        help="0 always takes the most probable token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=unsigned_int,
        default=0,
        metavar="K",
        help="sample from the K most probable tokens; 0: all",
    )
    parser.add_argument(
        "--top-p",
        type=real_number("a number above 0 and up to 1", lambda value: 0 < value <= 1),
        default=1.0,
        metavar="P",
        help="sample from the most probable tokens that together have this probability; 1: all",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="N", help="seed of sampling (default: 1234)"
    )
    add_layout_options(parser, example="precision.use=fp32", otherwise="text")


def run(args: argparse.Namespace) -> int:
    """Write, on this process or on ranks that it starts."""
    texts = prompts_of(args.prompt)
    check_chat(args)
    plugins = plugin_arguments(args)
    registry = load_plugins(block=plugins.blocked, local=plugins.local)

    from nanotrain_core.api.ranks import Ranks
    from nanotrain_sample.output import Asked
    from nanotrain_sample.ranks import degrees_of, run_on_ranks
    from nanotrain_sample.source import find, fitting_codec, note_length, prefix_of
    from nanotrain_sample.write import SampleJob

    degrees = degrees_of(args.degree)
    source = find(Path(args.path), args.step, args.tokenizer, registry)
    joined = Ranks.joined()

    def job_of(recipe: str, found: Resolution) -> SampleJob:
        codec = fitting_codec(found, source.tokenizer)
        how = how_of(args, found, codec, source.ends)
        if args.chat:
            data = conversations_of(found, source)
            asked_for = [data.answer_prompt(messages_of(text, args.system)) for text in texts]
            how = attrs.evolve(how, ends=how.ends.union(*(ends for _, ends in asked_for)))
            prompts = tuple(
                fitting(text, tokens, how) for text, (tokens, _) in zip(texts, asked_for, strict=True)
            )
        else:
            prefix = prefix_of(source, codec, found)
            prompts = tuple(
                encoded(text, codec, how, special=args.special_tokens, prefix=prefix) for text in texts
            )
        asked = Asked(
            weights=str(source.path),
            prompts=prompts,
            how=how,
            json=args.json,
        )
        if not joined or joined.rank == 0:
            longest = max(len(prompt) + asked.how.tokens for prompt in asked.prompts)
            note_length("texts may have", longest, source.length, asked.how.limit)
        return SampleJob(
            recipe=recipe,
            overrides=tuple(args.set),
            plugins=plugins,
            weights=asked.weights,
            tokenizer=source.tokenizer,
            asked=asked,
        )

    return run_on_ranks(job_of, source, degrees, args.set, registry, plugins=plugins)


def prompts_of(given: Sequence[str]) -> list[str]:
    """Return the prompts, that of standard input read.

    Raises:
        NanotrainError: standard input is named twice, or a prompt is not UTF-8.
    """
    for text in given:
        check_utf8("--prompt", text)
    if given.count("-") > 1:
        raise NanotrainError("--prompt -: standard input can be read once")
    return [_standard_input() if text == "-" else text for text in given or [NO_PROMPT]]


def check_utf8(option: str, text: str) -> None:
    """Reject an argument with bytes that are not UTF-8, which Python hands on as surrogates.

    Raises:
        NanotrainError: it has some; no tokenizer encodes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NanotrainError(f"{option}: not UTF-8 text (character {error.start + 1})") from None


def _standard_input() -> str:
    """Return all of standard input, which is UTF-8 whatever the locale says."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1}"
        raise NanotrainError(f"--prompt -: standard input is not UTF-8 ({where})") from None


def how_of(args: argparse.Namespace, found: Resolution, codec: TextCodec, ends: frozenset[int]) -> How:
    """Return what is asked of the model, whose weights say that ``ends`` end a text too."""
    from nanotrain_sample.generate import How
    from nanotrain_sample.source import ends_of

    model = found.registry.build(found.recipe.model)
    return How(
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        vocab=codec.vocab_size,
        ends=ends_of(codec, ends),
        limit=model.max_length,
    )


def encoded(
    text: str, codec: TextCodec, how: How, *, special: bool = False, prefix: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the tokens of a prompt, after those of ``prefix`` unless it begins with them.

    Raises:
        NanotrainError: there are none, or more than the model reads; or special tokens are asked for, and
            the tokenizer has none that text can name.
    """
    if special and not isinstance(codec, EncodesSpecial):
        raise NanotrainError("--special-tokens: expected a tokenizer.json, whose special tokens have names")
    try:
        encode = codec.encode_special if special and isinstance(codec, EncodesSpecial) else codec.encode
        tokens = encode(text)
    except DataError as problem:
        raise DataError(f"{problem}; --tokenizer FILE names a tokenizer") from None
    if tuple(tokens[: len(prefix)]) != prefix:
        tokens = [*prefix, *tokens]
    return fitting(text, tokens, how)


def fitting(text: str, tokens: Sequence[int], how: How) -> tuple[int, ...]:
    """Return the tokens of a prompt, of which there are some and no more than the model reads.

    Raises:
        NanotrainError: there are none, or too many.
    """
    if not tokens:
        raise NanotrainError(f"the prompt {text[:60]!r} has no tokens: expected some text to continue")
    if how.limit is not None and len(tokens) > how.limit:
        raise NanotrainError(
            f"the prompt {text[:60]!r} has {len(tokens)} tokens, but the model reads at most {how.limit} "
            "(model.max_length): shorten it"
        )
    return tuple(tokens)


def check_chat(args: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        NanotrainError: they do not.
    """
    check_utf8("--system", args.system or "")
    if args.chat and not args.prompt:
        raise NanotrainError("--chat: expected --prompt TEXT, what the user says")
    if args.chat and args.special_tokens:
        raise NanotrainError("--special-tokens: the chat template writes them; a message is text")
    if args.system is not None and not args.chat:
        raise NanotrainError("--system is of a conversation: expected --chat beside it")


def conversations_of(found: Resolution, source: Source) -> HasConversations:
    """Return who makes prompts of conversations: the run's data, or the template beside weights alone.

    Raises:
        NanotrainError: no template is known, or another tokenizer is asked for than that of the run's data.
    """
    if "data" not in source.tables:
        assert source.tokenizer is not None
        for use in found.registry.names("data"):
            opened = found.registry.get("data", use).load_optional("conversations")
            if opened is not None and (beside := opened(source.tokenizer)) is not None:
                return beside  # type: ignore[no-any-return]
        raise NanotrainError(
            f"--chat: there is no chat template next to {source.tokenizer}, as chat_template.jinja or in "
            "tokenizer_config.json, or no plugin that reads one (nanotrain-data); expected one, or the "
            "template written out in --prompt with --special-tokens"
        )
    data = found.registry.build(found.recipe.data)
    if not isinstance(data, HasConversations):
        raise NanotrainError(
            f"--chat: data '{found.recipe.data.use}' are no conversations, so no template is known; "
            "expected a run on [data] use = 'chat', or the template written out in --prompt with "
            "--special-tokens"
        )
    if source.tokenizer is not None:
        raise NanotrainError(
            "--chat: the template is for the tokenizer of the run's data: leave --tokenizer out"
        )
    return data


def messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation that the assistant is to answer."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
