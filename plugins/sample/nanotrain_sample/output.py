"""What the user sees: text as it comes, then how fast it came; or all of it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import attrs

from nanotrain_core.api.text import TextCodec
from nanotrain_sample.generate import How, Text
from nanotrain_sample.stream import Stream

#: ``stopped`` of a text, as a sentence ends; of one that is as long as was asked for nothing is said.
WHY = {"end": "the model ended it", "limit": "the model reads no more than {limit} tokens (max_length)"}


@attrs.define(frozen=True, kw_only=True)
class Asked:
    """What the user asked for."""

    weights: str
    """What :func:`~nanotrain_core.api.torch.open_weights` opens."""
    prompts: tuple[tuple[int, ...], ...]
    """Tokens of each, at least one."""
    how: How
    json: bool = False


class Teller:
    """Prints on rank 0: text to standard output, all else to standard error."""

    def __init__(self, codec: TextCodec, asked: Asked, model: str) -> None:
        self.codec, self.asked, self.model = codec, asked, model
        self.texts: list[Text] = []
        self._stream: Stream | None = None
        self._streamed = -1

    def note(self, text: str) -> None:
        """Say something that the user may want to know."""
        print(f"nanotrain: note: {text}", file=sys.stderr, flush=True)

    def begin(self, number: int) -> Callable[[int], None]:
        """Print a prompt; return what prints the text of each further token."""
        self._streamed = number
        if self.asked.json:
            return lambda token: None
        prompt = self.asked.prompts[number]
        if len(self.asked.prompts) > 1:
            _print(f"--- {number + 1} of {len(self.asked.prompts)} ---\n")
        stream = self._stream = Stream(self.codec.decode, prompt)
        _print(self.codec.decode(prompt))
        return lambda token: None if token in self.asked.how.ends else _print(stream.more(token))

    def text(self, text: Text) -> None:
        """Print the end of a text, or all of it where another replica of the model wrote it."""
        self.texts.append(text)
        if self.asked.json:
            return
        if text.number != self._streamed:
            tell = self.begin(text.number)
            for token in text.tokens:
                tell(token)
        assert self._stream is not None
        _print(self._stream.rest() + "\n")
        if text.stopped in WHY:
            why = WHY[text.stopped].format(limit=self.asked.how.limit)
            self.note(f"{len(text.tokens)} of {self.asked.how.tokens} tokens: {why}")

    def end(self) -> None:
        """Print how fast it was, or everything as JSON."""
        self.texts.sort(key=lambda text: text.number)
        if self.asked.json:
            print(json.dumps(self._as_json(), ensure_ascii=False, indent=2), flush=True)
            return
        read = sum(len(self.asked.prompts[text.number]) for text in self.texts)
        written = sum(len(text.tokens) - 1 for text in self.texts)
        lines = [f"prefill {_rate(read, sum(text.prefill for text in self.texts))}"]
        if written:
            lines.append(f"decode {_rate(written, sum(text.decode for text in self.texts))}")
        size = max((text.bytes_per_token or 0 for text in self.texts), default=0)
        if size:
            lines.append(f"cache {size:,} bytes a token on a rank")
        print("; ".join(lines), file=sys.stderr, flush=True)

    def _as_json(self) -> dict[str, Any]:
        sizes = [text.bytes_per_token for text in self.texts if text.bytes_per_token is not None]
        return {
            "weights": self.asked.weights,
            "model": self.model,
            "cache_bytes_per_token": max(sizes, default=None),
            "texts": [self._one(text) for text in self.texts],
        }

    def _one(self, text: Text) -> dict[str, Any]:
        prompt = self.asked.prompts[text.number]
        stream = Stream(self.codec.decode, prompt)
        pieces = [stream.more(token) for token in text.tokens if token not in self.asked.how.ends]
        return {
            "prompt": self.codec.decode(prompt),
            "text": "".join([*pieces, stream.rest()]),
            "prompt_tokens": len(prompt),
            "tokens": list(text.tokens),
            "stopped": text.stopped,
            "prefill_seconds": text.prefill,
            "decode_seconds": text.decode,
        }


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens at {tokens / max(seconds, 1e-9):,.0f} tokens/s"


def _print(text: str) -> None:
    print(text, end="", flush=True)
