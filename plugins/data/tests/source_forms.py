"""One corpus in every form that is read, and what is prepared of it."""

import gzip
import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from corpora import texts

TEXTS = texts(300)


def documents_of(folder):
    """Return each document as text, read with numpy alone; bytes are tokens, and 0 ends a document."""
    found = []
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        tokens = np.fromfile(folder / f"{shard['name']}.tokens", manifest["dtype"])
        offsets = np.fromfile(folder / f"{shard['name']}.offsets", np.int64)
        assert offsets[0] == 0
        assert offsets[-1] == len(tokens) == shard["tokens"]
        for begin, end in pairwise(offsets):
            assert tokens[end - 1] == 0
            found.append(tokens[begin : end - 1].tobytes().decode())
    return found


def lines_of(some, field="text"):
    return "".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(some))


def arrow(folder, some, field="text"):
    """Write what ``save_to_disk`` of Hugging Face datasets does: a stream of batches for each file."""
    folder.mkdir()
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (some[:100], some[100:]), strict=True):
        table = pa.table({field: part, "id": range(len(part))})
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=64)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def corpus(folder, form):
    """Write :data:`TEXTS` in a form, and return what is to be read."""
    folder.mkdir()
    path = folder / f"corpus.{form}"
    lines = lines_of(TEXTS).encode()
    if form == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.txt").write_text(text, newline="")
        return folder
    if form == "datasets":
        arrow(path, TEXTS)
    elif form == "parquet":
        pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=50)
    elif form == "jsonl.zst":  # frames of any length, as parallel compressors write them
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(b"".join(compress(lines[at : at + 7000]) for at in range(0, len(lines), 7000)))
    else:
        path.write_bytes(gzip.compress(lines) if form == "jsonl.gz" else lines)
    return path
