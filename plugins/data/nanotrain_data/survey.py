"""What can be said of prepared folders from their manifests. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nanotrain_core.api import DataError, Problem, Survey
from nanotrain_data.config import ChatConfig, ShardsConfig, StreamingConfig
from nanotrain_data.conversation_corpus import Conversations, nothing_to_learn
from nanotrain_data.manifest import Manifest, read_manifest
from nanotrain_data.pieces import check_alike, check_one_tokenizer, pieces_of
from nanotrain_data.verify import size_problems


def survey(config: ShardsConfig, length: int, longest: int = 0) -> Survey:
    """Return vocabulary and sequences of ``length`` tokens: see ``Component.survey``."""
    manifests, problems = [], []
    for number, path in enumerate(config.paths):
        key = f"data.paths.{number}"
        try:
            manifests.append(read_manifest(Path(path)))
            problems += [Problem(key, line) for line in size_problems(Path(path), manifests[-1])]
        except DataError as error:
            problems.append(Problem(key, str(error)))
    return Survey(problems=problems) if problems else _of_manifests(config, manifests, length, longest)


def _of_manifests(
    config: ShardsConfig | StreamingConfig, manifests: Sequence[Manifest], length: int, longest: int
) -> Survey:
    vocab = max(manifest.vocab_size for manifest in manifests)
    key = "data.paths" if isinstance(config, ShardsConfig) else "data.urls"
    try:
        check_alike(config, manifests)
    except DataError as error:
        return Survey(vocab=vocab, problems=(Problem(key, str(error)),))
    try:
        pieces = pieces_of(config, manifests, max(longest, length, config.piece_length))
    except DataError as error:
        return Survey(vocab=vocab, problems=(Problem("batch.length", str(error)),))
    return Survey(
        vocab=vocab,
        train=sum(each.sequences(length, validation=False) for each in pieces),
        validation=sum(each.sequences(length, validation=True) for each in pieces),
    )


def survey_chat(config: ChatConfig, length: int, longest: int = 0) -> Survey:
    """Return the same of conversations: they are packed for it."""
    found, problems = [], []
    for number, path in enumerate(config.paths):
        try:
            found.append(Conversations(Path(path), config))
        except DataError as error:
            problems.append(Problem(f"data.paths.{number}", str(error)))
    if problems:
        return Survey(problems=problems)
    manifests = [each.manifest for each in found]
    vocab = max(manifest.vocab_size for manifest in manifests)
    try:
        check_one_tokenizer(config.paths, manifests)
    except DataError as error:
        return Survey(vocab=vocab, problems=(Problem("data.paths", str(error)),))
    train, held = (
        [len(each.packs(length, validation=validation)) for each in found] for validation in (False, True)
    )
    if not all(train):
        path = config.paths[train.index(0)]
        return Survey(vocab=vocab, problems=(Problem("batch.length", nothing_to_learn(path, length)),))
    return Survey(vocab=vocab, train=sum(train), validation=sum(held))


def survey_streaming(config: StreamingConfig, length: int, longest: int = 0) -> Survey:
    """Return the same of folders elsewhere, of which the manifests are read."""
    from nanotrain_data.remote import RemoteFolder

    manifests, problems = [], []
    for number, url in enumerate(config.urls):
        try:
            manifests.append(RemoteFolder(url, config).manifest())
        except DataError as error:
            problems.append(Problem(f"data.urls.{number}", str(error)))
    return Survey(problems=problems) if problems else _of_manifests(config, manifests, length, longest)
