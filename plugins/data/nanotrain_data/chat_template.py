"""The chat template of a tokenizer: where it is found, and what it makes of a conversation.

Rendered by Hugging Face ``transformers``, in whose sandbox a template from the Hub can do no harm.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import DataError
from nanotrain_core.api.text import missing_path
from nanotrain_data.codecs import kind_of

#: A message: ``role``, ``content``, and what else a template may read.
Message = Mapping[str, Any]
#: JSON schemas of the functions that the assistant may call in a conversation; None: nothing is said of any.
Tools = Sequence[Mapping[str, Any]] | None
#: Characters of a rendered conversation: begin and end of a stretch that the assistant wrote.
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
#: Files beside a tokenizer.json that may hold its template, the one that counts first.
FILES = ("chat_template.jinja", "tokenizer_config.json")
#: Names of templates, where there are several, and the file that may hold that of conversations with tools.
DEFAULT, TOOL_USE = "default", "tool_use"
ADDITIONAL = f"additional_chat_templates/{TOOL_USE}.jinja"


@attrs.define(frozen=True)
class ChatTemplate:
    """A Jinja template, and the words that it is given beside the messages."""

    name: str
    """Of its file."""
    source: str
    words: Mapping[str, Any]
    """Special tokens by their names, as ``eos_token``."""
    tool_use: str | None = None
    """The template of conversations with tools; None: ``source`` is of those too."""
    date: str | None = None
    """The day that ``strftime_now`` tells, as 2026-11-29; None: no template asks."""

    @property
    def sha256(self) -> str:
        """Over all that decides what it renders."""
        known: list[Any] = [self.source, dict(self.words)]
        if (self.tool_use, self.date) != (None, None):
            known += [self.tool_use, self.date]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def of_tools(self, tools: Tools) -> str:
        """Return the template of conversations with these tools, as transformers chooses it."""
        return self.source if tools is None or self.tool_use is None else self.tool_use

    def render(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the stretches of it that the assistant wrote.

        These are what the template has between ``{% generation %}`` and ``{% endgeneration %}``. Without
        such: of each assistant message all that is rendered behind the prompt that asks for it
        (``add_generation_prompt``), which is where the model will begin.

        Raises:
            ValueError: the template refuses the messages, or an assistant message does not follow its prompt.
        """
        text, spans = self._text(messages, tools)
        if _marks_answers(self.of_tools(tools)):
            return text, [(begin, end) for begin, end in spans if begin < end]
        found = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, _ = self._text(messages[:number], tools, add_generation_prompt=True)
                turn, _ = self._text(messages[: number + 1], tools)
                if not (turn.startswith(prompt) and text.startswith(turn)):
                    raise ValueError(
                        f"the template {self.name} renders message {number + 1} not as what its prompt is "
                        "continued with; expected {% generation %} in it around what the assistant writes"
                    )
                found.append((len(prompt), len(turn)))
        return text, found

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation up to where the assistant's next message begins; no stretches.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._text(messages, tools, add_generation_prompt=True)[0], []

    def _text(self, messages: Sequence[Message], tools: Tools, **options: bool) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self.of_tools(tools)
        render: Any = render_jinja_template  # which is said to return a string, and returns two lists
        try:
            texts, spans = render(
                [list(messages)],
                None if tools is None else list(tools),
                chat_template=source if self.date is None else _dated(source, self.date),
                return_assistant_tokens_mask=_marks_answers(source),
                **options,
                **self.words,
            )
        except (TemplateError, TypeError) as error:  # a filter raises TypeError of what it does not take
            raise ValueError(f"the template {self.name} refuses it: {error}") from None
        return texts[0], spans[0] if spans else []


def find_template(tokenizer: str, given: str | None, date: str | None = None) -> ChatTemplate | None:
    """Return the template that was given, or that lies beside the tokenizer; None: there is none.

    Args:
        tokenizer: ``bytes``, or the file of one.
        given: a file of Jinja, or a ``tokenizer_config.json``; ``plain`` for none.
        date: that the template is told if it asks; None: today's.

    Raises:
        DataError: the file is missing or has no template, or the package is that renders it; or the template
            writes a special token that no file names, or the day in a form that it computes.
    """
    if given == "plain":
        return None
    beside = Path(tokenizer).parent
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise DataError(missing_path(path, "chat template"))
    elif tokenizer == "bytes" or (path := _with_template(beside)) is None:  # type: ignore[assignment]
        return None
    config = beside / "tokenizer_config.json"
    words = _special_words(config) if tokenizer != "bytes" else {}
    if path.suffix == ".json":
        config, words = path, {**words, **_special_words(path)}
        sources = _of_config(path)
        if not sources:
            raise DataError(f"{path} has no chat_template; expected one, or '--chat-template plain'")
    else:
        sources = {DEFAULT: _read(path)}
    if given is None and (more := beside / ADDITIONAL).is_file():
        sources[TOOL_USE] = _read(more)
    source, tool_use = sources[DEFAULT], sources.get(TOOL_USE)
    _check_renderer(path)
    missing = (_unknown_words(source) | _unknown_words(tool_use or "")) - words.keys()
    if missing and kind_of(tokenizer) == "huggingface":
        name = min(missing)
        raise DataError(
            f"the chat template {path} writes {name}, which would be empty, since no file names it: put "
            f'"{name}": "..." into {config}, or null if the tokenizer has none'
        )
    words = {name: word for name, word in words.items() if word is not None}
    try:
        asks = _formats(source) | _formats(tool_use or "")
    except ValueError:
        raise DataError(
            f"the chat template {path} gives strftime_now what is no string: expected a format such as "
            "'%d %b %Y', for which one day is kept for all conversations"
        ) from None
    return ChatTemplate(path.name, source, words, tool_use, (date or today()) if asks else None)


def today() -> str:
    """Return the date of this machine."""
    return datetime.now().date().isoformat()


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string in what JSON can hold, names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings_of([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings_of(each)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same with each of these strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {with_strings(key, change): with_strings(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(each, change) for each in value]
    return value


def _with_template(folder: Path) -> Path | None:
    for name in FILES:
        path = folder / name
        if path.is_file() and (path.suffix != ".json" or _of_config(path)):
            return path
    return None


def _of_config(path: Path) -> dict[str, str]:
    """Return the templates of a ``tokenizer_config.json`` by name, one that has none as ``default``.

    Raises:
        DataError: of several none is called so, as transformers refuses it too.
    """
    found = _json(path).get("chat_template")
    if not isinstance(found, list):
        return {DEFAULT: found} if isinstance(found, str) else {}
    named = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
    if named and DEFAULT not in named:
        raise DataError(
            f"{path} has several chat templates ({', '.join(named)}), and none is called default: write "
            "the one that is meant into a file, and name that with --chat-template"
        )
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _marks_answers(source: str) -> bool:
    """Return whether a template says itself what the assistant writes."""
    return _GENERATION.search(source) is not None


def _special_words(path: Path) -> dict[str, str | None]:
    """Return what a template may call special tokens by, as ``bos_token``; None: said to be none.

    Read as transformers does: in folders without ``added_tokens_decoder``, which are older, what
    ``special_tokens_map.json`` says counts first. Defaults of tokenizer classes are not known here.
    """
    beside = path.with_name("special_tokens_map.json")
    config, mapped = (_json(file) if file.is_file() else {} for file in (path, beside))
    words: dict[str, str | None] = {}
    for table in (mapped, config) if "added_tokens_decoder" in config else (config, mapped):
        extra = table.get("extra_special_tokens")
        for name, value in {**table, **(extra if isinstance(extra, dict) else {})}.items():
            content = value.get("content") if isinstance(value, dict) else value
            named = name.endswith("_token") or (isinstance(extra, dict) and name in extra)
            if named and (content is None or isinstance(content, str)):
                words[name] = content
    return words


def _unknown_words(source: str) -> set[str]:
    """Return the special tokens that a template reads and does not set itself."""
    from jinja2 import meta

    parsed = _parsed(source)
    names = meta.find_undeclared_variables(parsed) if parsed is not None else set()
    return {name for name in names if name.endswith("_token")}


def _formats(source: str) -> set[str]:
    """Return the formats that a template calls ``strftime_now`` with.

    Raises:
        ValueError: one is no string that the template has.
    """
    from jinja2 import nodes

    found = set()
    parsed = _parsed(source)
    for call in parsed.find_all(nodes.Call) if parsed is not None else ():
        if isinstance(call.node, nodes.Name) and call.node.name == "strftime_now":
            for given in [*call.args, *(each.value for each in call.kwargs)]:
                try:
                    found.add(str(given.as_const()))
                except nodes.Impossible:
                    raise ValueError from None
    return found


@cache
def _dated(source: str, date: str) -> str:
    """Return a template whose ``strftime_now`` tells a day, where transformers' tells that of the call.

    A macro stands for it, since transformers gives functions to no template. It is a line that Jinja takes
    out: the template's own first line is still at the beginning of one.
    """
    day = datetime.fromisoformat(date)
    said = json.dumps({form: day.strftime(form) for form in _formats(source)})
    return f"{{% macro strftime_now(format) %}}{{{{ {said}[format] }}}}{{% endmacro %}}\n{source}"


def _parsed(source: str) -> Any:
    """Return a template as Jinja parses it; None: it does not, and rendering says what is wrong with it."""
    from jinja2 import Environment, TemplateError

    try:
        return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAGS.sub("", source))
    except TemplateError:
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise DataError(f"{path} is damaged: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a JSON object")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _check_renderer(path: Path) -> None:
    try:
        import transformers.utils.chat_template_utils  # noqa: F401 only looked for
    except ImportError:
        raise DataError(
            f"the chat template {path} needs the package transformers: pip install nanotrain-data[chat]"
        ) from None
