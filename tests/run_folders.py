"""Runs that do nothing but claim their folders."""

from nanotrain_core.run.folder import RunFolder


def run_once(name: str, **options) -> str:
    """Claim a folder as a run that ends; return its path."""
    folder = RunFolder.claim(name, **options)
    (folder.path / "metrics.jsonl").write_text("")
    folder.release()
    return str(folder.path)
