"""What each rank does: rank 0 asks, all of them answer, and rank 0 tells the user."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs

from nanotrain_core.api import Resolution
from nanotrain_core.api.torch import Run
from nanotrain_sample.evaluate.answers import Answers
from nanotrain_sample.evaluate.measure import Measured, check_split, read_text, validation
from nanotrain_sample.evaluate.output import tell
from nanotrain_sample.ranks import ForwardJob
from nanotrain_sample.source import codec_of


@attrs.define(frozen=True, kw_only=True)
class Asked:
    """What the user asked for."""

    texts: tuple[str, ...] = ()
    """Paths of files."""
    tasks: tuple[str, ...] = ()
    """Of ``lm_eval``."""
    task_folder: str | None = None
    few_shot: int | None = None
    limit: int | None = None
    length: int
    """Tokens that the model reads at once."""
    stride: int
    """Tokens of a file that one window scores."""
    prefix: tuple[int, ...] = ()
    """Tokens that stand before every text, such as BOS."""
    bos: int | None = None
    """The tokenizer's BOS, if it has one that stands before no text."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a generated text, beside the tokenizer's end-of-text token."""
    json: bool = False


@attrs.define(frozen=True, kw_only=True)
class ScoreJob(ForwardJob):
    """Files and tasks to score, with a model whose data are not opened."""

    asked: Asked

    def compute(self, found: Resolution, run: Run) -> None:
        """Answer what rank 0 asks for, until it asks for no more."""
        read_codec = partial(codec_of, found.recipe, self.tokenizer, found.registry)
        answers = Answers(run, found.registry.build(found.recipe.model), read_codec)
        if run.mesh.rank:
            answers.follow()
            return
        asked, codec = self.asked, answers.codec
        measured, tasks = list[Measured](), dict[str, Any]()
        for path in asked.texts:
            text = read_text(Path(path), codec, asked.length, asked.stride, asked.prefix)
            measured.append(text.measured(answers.scores(text.requests)))
        if asked.tasks:
            from nanotrain_sample.evaluate.tasks import run_tasks

            tasks = run_tasks(
                asked.tasks,
                asked.task_folder,
                codec,
                answers,
                length=asked.length,
                prefix=asked.prefix,
                ends=asked.ends,
                bos=asked.bos,
                few_shot=asked.few_shot,
                limit=asked.limit,
            )
        answers.end()
        tell(self.weights, found.recipe.model.use, measured, tasks, json=asked.json)


@attrs.define(frozen=True, kw_only=True)
class ValidationJob(ForwardJob):
    """The run's validation split."""

    opens_data: ClassVar[bool] = True
    fingerprint: str | None
    """Of the data that the run trained on."""
    lengths: tuple[int, ...]
    """Of the run's sequences."""
    json: bool = False

    def compute(self, found: Resolution, run: Run) -> None:
        """Evaluate as the run did."""
        check_split(run.feed.data, found.recipe, self.fingerprint, self.lengths)
        measured = validation(run)
        if run.mesh.rank == 0:
            tell(self.weights, found.recipe.model.use, [measured], {}, json=self.json)
