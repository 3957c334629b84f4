"""Small corpora for tests: texts that are all different, and folders prepared of them."""

import numpy as np
from nanotrain_data.manifest import Manifest, TokenizerInfo
from nanotrain_data.prepare import prepare
from nanotrain_data.request import Request
from nanotrain_data.writer import Document, shard_name, write_shard


def texts(count, seed=0):
    """Return ``count`` texts of some words each, with characters of one to four bytes."""
    random = np.random.default_rng(seed)
    words = ["alpha", "beta", "naïve", "日本", "🙂", "x" * 40, "\\n\n", "<|endoftext"]
    return [f"{number} " + " ".join(random.choice(words, random.integers(1, 30))) for number in range(count)]


def begun(data, length, seed, lengths):
    """Return a data component, open, as a run opens it that may change to other ``lengths``."""
    if lengths:
        data.expect_lengths(lengths)
    data.open(length=length, seed=seed)
    return data


def prepared(folder, sources, *, workers=1, tokenizer="bytes", **options):
    """Prepare a folder, and return what was done."""
    sources = (sources,) if not isinstance(sources, (list, tuple)) else sources
    request = Request(sources=tuple(map(str, sources)), tokenizer=str(tokenizer), out=folder, **options)
    return prepare(request, workers)


def numbered(folder, tokens, *, first=0, shards=3, vocab=2**17):
    """Write a folder whose i-th token is ``first`` + i: a batch tells where it was read."""
    edges = np.linspace(0, tokens, shards + 1).astype(int)
    info = TokenizerInfo(kind="unknown", name="numbers", sha256="0" * 64)
    folder.mkdir(parents=True)
    made = []
    for number in range(shards):
        content = np.arange(first + edges[number], first + edges[number + 1])
        documents = [Document(some, len(some)) for some in np.array_split(content, 5)]
        made.append(write_shard(folder, shard_name(number), "uint32", documents))
    Manifest(
        tokenizer=info,
        vocab_size=vocab,
        dtype="uint32",
        end_of_document=None,
        made_of=f"{tokens} from {first}",
        shards=tuple(made),
    ).write(folder)
    return folder
