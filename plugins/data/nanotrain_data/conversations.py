"""Conversations to tokens, and which of these the assistant wrote: those alone are learned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import attrs
import numpy as np
import numpy.typing as npt

from nanotrain_core.api import DataError, did_you_mean
from nanotrain_core.api.text import open_tokenizer_file
from nanotrain_data.chat_template import (
    ChatTemplate,
    Message,
    Span,
    Tools,
    find_template,
    strings_of,
    with_strings,
)
from nanotrain_data.codecs import Codec, codec_of, kind_of, open_codec
from nanotrain_data.manifest import Manifest

#: The field that says beside the messages which functions the assistant may call.
TOOLS = "tools"
#: The field of a message with the functions that the assistant calls.
CALLS = "tool_calls"
#: What renders a conversation, and says where the answers are.
Render = Callable[[Sequence[Message], Tools], tuple[str, list[Span]]]
#: Of messages, where no template says otherwise.
ROLES = ("system", "user", "assistant")


@attrs.define(frozen=True)
class Conversation:
    """A conversation as tokens."""

    tokens: Sequence[int]
    answers: Sequence[Span]
    """Stretches of tokens that are learned, begin and end; none begins with the first token, before which
    there is nothing to predict it from."""
    bytes: int
    """Of its messages, as UTF-8."""


class ConversationCodec(Protocol):
    """Who makes tokens of conversations."""

    @property
    def template(self) -> ChatTemplate | None:
        """None: the plain form."""
        ...

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> Conversation:
        """Return the tokens of a conversation.

        Args:
            messages: of it.
            tools: that the assistant is told of.

        Raises:
            ValueError: it cannot be rendered.
        """
        ...

    def prompt(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Return the tokens behind which an answer begins, and those that end it.

        Raises:
            ValueError: they cannot be rendered.
        """
        ...


def open_conversation_codec(
    codec: Codec, tokenizer: str, template: str | None, date: str | None = None
) -> ConversationCodec:
    """Return who makes tokens of conversations, for a tokenizer that is open.

    Args:
        codec: the tokenizer.
        tokenizer: its name: ``bytes``, or a file.
        template: a file, ``plain``, or None for what lies beside the tokenizer, or else the plain form.
        date: that the template is told if it asks; None: today's.

    Raises:
        DataError: the template cannot be read, is for another kind of tokenizer, or the plain form has no
            token to end an answer with.
    """
    found = find_template(tokenizer, template, date)
    if found is None:
        if codec.separator is None:
            raise DataError(
                f"the tokenizer {tokenizer} has no token that ends a text, with which the plain form ends "
                "answers: name a --chat-template"
            )
        return PlainConversations(codec)
    if kind_of(tokenizer) != "huggingface":
        raise DataError(
            f"a chat template names special tokens as text, which tokenizer {tokenizer} does not know: "
            "expected a tokenizer.json, or '--chat-template plain'"
        )
    return TemplatedConversations(found, Path(tokenizer))


@attrs.define(frozen=True)
class Prompts:
    """Prompts for answers, of a tokenizer and the chat template next to it."""

    codec: ConversationCodec

    def answer_prompt(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Return the tokens behind which an answer begins, and those that end it.

        Raises:
            DataError: the template refuses the messages.
        """
        try:
            return self.codec.prompt(messages_of(list(messages)))
        except ValueError as problem:
            raise DataError(f"the conversation {problem}") from None


def conversations_beside(tokenizer: str) -> Prompts | None:
    """Return who makes prompts of conversations with the chat template next to a tokenizer, None without one.

    Raises:
        DataError: as :func:`open_conversation_codec`.
    """
    if find_template(tokenizer, None, None) is None:
        return None
    return Prompts(open_conversation_codec(open_codec(tokenizer), tokenizer, None))


def known_conversations(folder: Path, manifest: Manifest) -> ConversationCodec:
    """Return who made the tokens of a prepared folder, from what it keeps.

    Raises:
        DataError: it does not keep its template, or not its tokenizer.
    """
    codec, chat = codec_of(folder, manifest), manifest.chat
    if chat is None or (chat.template != "plain" and chat.source is None):
        raise DataError(f"{folder} does not keep its chat template: prepare it again")
    if chat.source is None:
        return PlainConversations(codec)
    template = ChatTemplate(chat.template, chat.source, chat.words or {}, chat.tool_use, chat.date)
    return TemplatedConversations(template, folder / str(manifest.tokenizer.file))


def messages_of(value: Any) -> list[Message]:
    """Return messages that were read, checked.

    A field that is null is left out, as by transformers: a template would find it there, and write ``None``.
    A message that calls tools may have no content.

    Raises:
        ValueError: they are none, with what was expected.
    """
    if not isinstance(value, list):
        raise ValueError(f"is of type {type(value).__name__}; expected a list of messages")
    found: list[Message] = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ValueError(f"has message {number} of type {type(message).__name__}; expected an object")
        found.append({key: said for key, said in message.items() if said is not None})
        only_calls = bool(message.get(CALLS)) and message.get("content") is None
        for key in ("role",) if only_calls else ("role", "content"):
            if not isinstance(message.get(key), str):
                near = did_you_mean(key, list(message)) if key not in message else ""
                kind = type(message[key]).__name__ if key in message else "missing"
                raise ValueError(f"has message {number} with {key} {kind}{near}; expected a string")
    return found


def tools_of(value: Any) -> Tools:
    """Return the tools of a conversation that were read, checked; JSON where a table holds them as text.

    Raises:
        ValueError: they are none, with what was expected.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value) if value else None
        except ValueError as error:
            raise ValueError(f"is text, but no JSON: {error}") from None
    if found is not None and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise ValueError(f"is {str(found)[:40]!r}; expected a list of objects, the JSON schemas of functions")
    return found


class PlainConversations:
    """The form without a template, of any tokenizer: ``### Role``, a line with the content, an empty line.

    An answer ends with the tokenizer's token that ends a text, which is learned with it.
    """

    template = None

    def __init__(self, codec: Codec) -> None:
        assert codec.separator is not None
        self._codec, self._end = codec, codec.separator

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> Conversation:
        """Return the tokens of a conversation. Contents are encoded as text, whatever they look like.

        Raises:
            ValueError: a role is none of the three, there are tools or calls of them, or a content has the
                token that ends answers, as the character 0 is for ``bytes``.
        """
        calls = any(message.get(CALLS) for message in messages)
        if tools or calls:
            what = f"{TOOLS} beside it" if tools else f"a message with {CALLS}"
            raise ValueError(f"has {what}, which the plain form cannot write: name a --chat-template")
        tokens: list[int] = []
        answers = []
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in ROLES:
                near = did_you_mean(role, ROLES)
                raise ValueError(f"has a message of role '{role}'{near}; expected {', '.join(ROLES)}")
            lead = "\n\n" if tokens else ""
            tokens += self._codec.encode(f"{lead}### {role.capitalize()}\n")
            begin = len(tokens)
            tokens += self._codec.encode(content)
            if self._end in tokens[begin:]:
                raise ValueError(f"has {content[:40]!r}, with the token that ends answers: {self._end}")
            if role == "assistant":
                tokens.append(self._end)
                answers.append((begin, len(tokens)))
        return Conversation(tokens, answers, _size(messages))

    def prompt(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Return the conversation with the line that an answer stands under, and the end-of-text token."""
        asked = [*messages, {"role": "assistant", "content": ""}]
        return list(self.encode(asked).tokens[:-1]), frozenset({self._end})


class TemplatedConversations:
    """A Hugging Face tokenizer and its template, rendered and tokenized as a whole.

    A special token that the template writes is that token. Written in a message, in whichever field of it, it
    is text: nobody can end a turn, or begin one as the system, by what they say. So are added tokens that are
    not flagged as special, if the template has them, such as DeepSeek's for roles. Tokens that come in pairs,
    such as ``<think>`` and ``</think>``, mark parts of a content, and stay tokens in it.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Path) -> None:
        from tokenizers import AddedToken

        self.template: ChatTemplate | None = template
        self._template = template
        self._whole = open_tokenizer_file(tokenizer)
        added = self._whole.get_added_tokens_decoder()
        special = {number: token for number, token in added.items() if self._is_control(token, added)}
        self._special = {token.content: number for number, token in special.items()}
        words = sorted(self._special, key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        # A tokenizer that reads special tokens as text has stand-ins for them: random, so no message has one.
        self._ordinary = open_tokenizer_file(tokenizer, as_text=words)
        self._stand_ins = {word: f"<{uuid4().hex}>" for word in words}
        rules = ("lstrip", "rstrip", "normalized")
        self._ordinary.add_tokens(
            [
                AddedToken(self._stand_ins[token.content], **{rule: getattr(token, rule) for rule in rules})
                for token in special.values()
            ]
        )
        self._stands_for = {
            self._ordinary.token_to_id(stand_in): self._special[word]
            for word, stand_in in self._stand_ins.items()
        }

    def _is_control(self, token: Any, added: Mapping[int, Any]) -> bool:
        word, template = token.content, self._template
        if token.special or word in template.words.values():
            return True
        words, name = {each.content for each in added.values()}, re.sub("^</?|>$", "", word)
        in_pairs = {f"<{name}>", f"</{name}>"} <= words
        in_brackets = word[0] in "<["  # not whitespace, or a word such as /nothink
        return in_brackets and not in_pairs and word in template.source + (template.tool_use or "")

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> Conversation:
        """Return the tokens of a conversation; one belongs to an answer if a character of it does.

        Raises:
            ValueError: the template cannot render it.
        """
        tokens, places, spans = self._rendered(messages, tools, self._template.render)
        return Conversation(tokens, stretches(np.array(places, np.int64), spans), _size(messages))

    def prompt(self, messages: Sequence[Message]) -> tuple[list[int], frozenset[int]]:
        """Return what the template renders with ``add_generation_prompt``, and the token that ends a turn.

        That is the first special token behind an answer's words: some templates begin answers with others.
        A template whose answers have none leaves them endless.

        Raises:
            ValueError: the template cannot render it.
        """
        tokens, _, _ = self._rendered(messages, None, self._template.prompt)
        words = "nanotrain"  # of several in the text, those of the last message are the last
        asked = with_strings(messages, partial(self._special_text.sub, " "))
        text, spans = self._template.render([*asked, {"role": "assistant", "content": words}])
        encoding = self._whole.encode(text, add_special_tokens=False)
        behind = max(text.rfind(words), spans[-1][0])
        special = {*self._special.values()}
        ends = [
            encoding.ids[at]
            for begin, end in stretches(np.array(encoding.offsets, np.int64), spans)
            for at in range(begin, end)
            if encoding.offsets[at][0] >= behind and encoding.ids[at] in special
        ]
        return tokens, frozenset(ends[:1])

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, render: Render
    ) -> tuple[list[int], list[Span], list[Span]]:
        """Return tokens, the characters that each is of, and the characters of answers."""
        if any(map(self._special_text.search, strings_of([messages, tools]))):
            return self._with_special_text(messages, tools, render)
        text, spans = render(messages, tools)
        encoding = self._whole.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets, spans

    def _with_special_text(
        self, messages: Sequence[Message], tools: Tools, render: Render
    ) -> tuple[list[int], list[Span], list[Span]]:
        """Return the same, of messages that write special tokens. Characters are those of the text encoded.

        What messages have of them is hidden while the template renders, each behind a character that no
        message has. Those that are found then are the template's, and stand-ins take their place. The text
        is encoded as a whole: at a special token a tokenizer may leave out whitespace, or add none.
        """
        hidden: dict[str, str] = {}
        unused = _unused_characters([messages, tools])

        def hide(match: re.Match[str]) -> str:
            if match[0] not in hidden.values():
                hidden[next(unused)] = match[0]
            return next(char for char, word in hidden.items() if word == match[0])

        text, spans = render(*with_strings([messages, tools], partial(self._special_text.sub, hide)))
        shown = [hidden.get(char, char) for char in text]
        for match in self._special_text.finditer(text):
            shown[match.start()] = self._stand_ins[match[0]]
            shown[match.start() + 1 : match.end()] = [""] * (len(match[0]) - 1)
        encoding = self._ordinary.encode("".join(shown), add_special_tokens=False)
        tokens = [self._stands_for.get(token, token) for token in encoding.ids]
        at = np.cumsum([0, *map(len, shown)]).tolist()
        return tokens, encoding.offsets, [(at[begin], at[end]) for begin, end in spans]


def stretches(places: npt.NDArray[np.int64], spans: Sequence[Span]) -> list[Span]:
    """Return the stretches of tokens that have characters of spans, but for the first token.

    Args:
        places: first character and end of each token, [n, 2].
        spans: of characters.
    """
    learned = np.zeros(len(places), np.bool_)
    for begin, end in spans:
        learned |= (places[:, 1] > begin) & (places[:, 0] < end)
    learned[:1] = False
    edges = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0, append=0))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _unused_characters(given: Any) -> Iterator[str]:
    """Yield characters that Unicode keeps free, and no string of what is given has."""
    said = {char for text in strings_of(given) for char in text}
    yield from (
        char for char in map(chr, chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE))) if char not in said
    )


def _size(messages: Sequence[Message]) -> int:
    return sum(len(message.get("content", "").encode()) for message in messages)
