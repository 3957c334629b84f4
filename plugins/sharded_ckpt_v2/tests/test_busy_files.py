"""Files that cannot be deleted, as those that another client of a network file system has open."""

import os

from small_run import opened, save, state


def test_a_leftover_that_cannot_be_deleted_refuses_no_resume(tmp_path, monkeypatch, capfd):
    save(opened(tmp_path), 1)
    for name in (".old-00000000-1", ".tmp-00000002-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    unlink = os.unlink

    def busy(path, **options):
        if str(path).endswith("file"):
            raise OSError(16, "Device or resource busy", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", busy)
    assert opened(tmp_path).load("latest", state(0, fill=-1.0)).meta == {"step": 1}
    assert "".join(capfd.readouterr()).count("a leftover could not be deleted") == 2
    monkeypatch.undo()
    opened(tmp_path)
    assert not [*tmp_path.glob(".*-0*")]
