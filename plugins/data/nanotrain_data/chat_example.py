"""Small conversations for the harness: see ``Component.example_of_text``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain_data.codecs import describe_codec
from nanotrain_data.manifest import ChatInfo, Manifest
from nanotrain_data.writer import Document, shard_name, write_shard

#: Bytes of what is asked, and of the answer: several fit into the short sequences of the harness.
ASKED, ANSWERED = (1, 4), (4, 13)


def example_of_conversations(text: Path, folder: Path) -> Mapping[str, Any]:
    """Cut a text into questions and answers, its bytes as tokens, without the words of a template."""
    made = [*_cut(text.read_bytes())]
    shards = [
        write_shard(folder, shard_name(number), "uint8", made[number::3], chat=True) for number in range(3)
    ]
    Manifest(
        tokenizer=describe_codec("bytes"),
        vocab_size=256,
        dtype="uint8",
        end_of_document=None,
        made_of="an example",
        chat=ChatInfo(template="none", sha256=""),
        shards=tuple(shards),
    ).write(folder)
    return {"paths": [str(folder)]}


def _cut(text: bytes) -> Iterator[Document]:
    random, place = np.random.default_rng(0), 0
    while place < len(text) - ANSWERED[1] - ASKED[1]:
        asked, answered = int(random.integers(*ASKED, endpoint=True)), int(random.integers(*ANSWERED))
        end = place + asked + answered
        yield Document(list(text[place:end]), end - place, [(asked, asked + answered)])
        place = end
