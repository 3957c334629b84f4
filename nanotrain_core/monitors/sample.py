"""The ``sample`` monitor: text that the model writes, so that one can see what it has learned."""

from __future__ import annotations

import json
import time

import structlog
import torch

from nanotrain_core.builtin.configs import SampleConfig
from nanotrain_core.contracts import EndReport, Monitor, RunInfo, StepReport
from nanotrain_core.errors import DataError
from nanotrain_core.models.sampling import draw

log = structlog.get_logger("nanotrain.sample")


class Sample(Monitor):
    """Continues a prompt on rank 0. Draws from its own stream, so the run's numbers stay as they are."""

    reads_weights = False

    def __init__(self, config: SampleConfig) -> None:
        self.config = config

    def on_start(self, run: RunInfo) -> None:
        """Encode the prompt. Where its text is none of the data's, say so and write nothing."""
        self.run, self.length = run, run.length or run.recipe.batch.length
        self.prompt: list[int] | None = None
        try:
            self.prompt = run.data.encode(self.config.prompt) or [0]
        except DataError as problem:  # on all ranks alike
            if run.rank == 0:
                log.warning("no samples will be written", prompt=self.config.prompt, why=str(problem))

    def on_step(self, report: StepReport) -> None:
        """Write a sample every so many steps."""
        self.length = report.length or self.length
        if self.config.every and report.step % self.config.every == 0 and report.step != self.run.steps:
            self._write(report.step)

    def on_end(self, report: EndReport) -> None:
        """Write the last sample."""
        if report.reason != "failed":
            self._write(report.step)

    def _write(self, step: int) -> None:
        if self.prompt is None:
            return
        text = self.run.data.decode(self._tokens(self.prompt, step))  # all ranks take part in forward passes
        if self.run.rank == 0:
            self._keep(step, text)
            print(f"--- sample after step {step} ---\n{text}\n---", flush=True)

    def _keep(self, step: int, text: str) -> None:
        """Add the sample to ``samples.jsonl`` of the run folder."""
        if self.run.folder is not None:
            row = {"step": step, "time": time.time(), "prompt": self.config.prompt, "text": text}
            with open(self.run.folder / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    @torch.no_grad()
    def _tokens(self, prompt: list[int], seed: int) -> list[int]:
        """Return prompt and continuation. Each token costs a whole forward pass: there is no cache."""
        device, window = self.run.device, self.length
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(self.config.tokens):
            context = (tokens[-window:] + [0] * window)[:window]  # causal: padding changes nothing before it
            logits = self.run.logits(torch.tensor([context], device=device))
            last = logits[0, min(len(tokens), window) - 1]
            tokens.append(draw(last, generator, temperature=self.config.temperature))
        return tokens
