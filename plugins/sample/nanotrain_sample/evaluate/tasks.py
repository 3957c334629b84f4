"""Tasks of EleutherAI's ``lm_eval``: its own code asks, and a nanotrain model answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from nanotrain_core.api import NanotrainError, did_you_mean
from nanotrain_core.api.text import TextCodec
from nanotrain_sample.evaluate.answers import Answers
from nanotrain_sample.evaluate.generation import empty_context, generation_of
from nanotrain_sample.evaluate.windows import Request, windows


def check_installed() -> None:
    """Refuse tasks where ``lm_eval`` is not there.

    Raises:
        NanotrainError: it is missing.
    """
    if find_spec("lm_eval") is None:
        raise NanotrainError(
            "--task needs lm_eval, which is not installed: pip install 'nanotrain-sample[tasks]'"
        )


def run_tasks(
    names: Sequence[str],
    folder: str | None,
    codec: TextCodec,
    answers: Answers,
    *,
    length: int,
    prefix: Sequence[int],
    ends: frozenset[int],
    bos: int | None,
    few_shot: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """Return what ``lm_eval.simple_evaluate`` returns for these tasks.

    Args:
        names: of tasks or groups, or paths of their YAML files.
        folder: with further tasks.
        codec: of the model.
        answers: scores and generates on all ranks.
        length: of what the model reads at once.
        prefix: tokens that stand before every text, such as BOS.
        ends: tokens that end a text, beside the end-of-text token of ``codec``.
        bos: the tokenizer's BOS, if it has one that stands before no text.
        few_shot: examples before each question; None: as the task says.
        limit: questions of each task, at most.

    Raises:
        NanotrainError: there is no such task, its generation arguments are not supported, or its questions
            cannot be read.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    known = manager.all_tasks
    for name in names:
        if not os.path.isfile(name) and name not in known:
            raise NanotrainError(f"--task {name}: lm_eval knows no such task{did_you_mean(name, known)}")
    try:
        found = simple_evaluate(
            model=adapter(codec, answers, length, prefix, ends, bos),
            tasks=[*names],
            num_fewshot=few_shot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise NanotrainError(
            f"--task {' --task '.join(names)}: the questions cannot be read: {error}. lm_eval downloads "
            "those of public tasks from the Hugging Face hub; of a task of your own, data_files are relative "
            "to the folder that nanotrain is started in"
        ) from error
    return dict(found)


def adapter(
    codec: TextCodec,
    answers: Answers,
    length: int,
    prefix: Sequence[int],
    ends: frozenset[int] = frozenset(),
    bos: int | None = None,
) -> Any:
    """Return the model as ``lm_eval`` knows models."""
    from lm_eval.api.model import TemplateLM
    from tqdm import tqdm  # which lm_eval needs

    class NanotrainLM(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
        """Log-likelihoods and texts of a nanotrain model."""

        @property
        def eot_token_id(self) -> int:
            """Return what stands for an empty context."""
            return empty_context(codec, prefix, bos)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            """Return the tokens of a text, after BOS unless ``add_special_tokens`` is false."""
            return [*(() if add_special_tokens is False else prefix), *codec.encode(string)]

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            asked = [_request(context, wanted, length) for _, context, wanted in requests]
            return [(score.log_probability, score.greedy) for score in answers.scores(asked)]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Return the log-likelihood of whole documents, in windows of what the model reads at once."""
            start = prefix or [self.eot_token_id]
            each = [[*windows(codec.encode(request.args[0]), length, length, start)] for request in requests]
            scores = iter(answers.scores([request for asked in each for request in asked]))
            return [sum(next(scores).log_probability for _ in asked) for asked in each]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """Return what the model writes after each context, up to the first of the task's stop strings."""
            asked = [
                generation_of(context, arguments, codec, length, where, prefix, ends, bos)
                for request in requests
                for (context, arguments), where in [(request.args, f"--task {request.task_name}")]
            ]
            quiet = disable_tqdm or not sys.stderr.isatty()
            with tqdm(total=len(asked), desc="generate", disable=quiet) as progress:
                return answers.texts(asked, progress.update)

    return NanotrainLM()


def _request(context: list[int], wanted: list[int], length: int) -> Request:
    """Return the answer after the end of its context that the model can read."""
    if len(wanted) > length:
        raise NanotrainError(
            f"an answer of {len(wanted)} tokens is longer than the {length} that the model reads at once "
            "(--length, or the model's max_length)"
        )
    return Request(tuple((context + wanted)[-(length + 1) :]), len(wanted))
