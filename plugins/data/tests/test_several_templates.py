"""Templates that are chosen or filled in by more than the messages: tools, and the day."""

import json
from datetime import datetime

import numpy as np
import pytest
import transformers
from chats import CHATML, MARKED, chats, prepared_chats, tokenizer_folder, write_chats
from nanotrain_data import unit_writer
from nanotrain_data.chat_template import find_template
from nanotrain_data.conversations import known_conversations
from nanotrain_data.manifest import read_manifest

from nanotrain_core.api import DataError

#: The whitespace at its beginning, and in front of a block, is left out by Jinja.
ASKS = (
    "\n  {%- macro day() %}{{ strftime_now(format='%d %b %Y') }}{% endmacro %}\n"
    "   {% if strftime_now is defined %}\n{{ day() ~ strftime_now('\"%H\\n') }}{% endif %}" + MARKED
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FOR_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize("form", ["list", "files"])
def test_conversations_with_tools_have_the_template_for_them(tmp_path, form):
    """As by transformers: rendered with the default template, tools had vanished without a word."""
    listed = [{"name": "default", "template": MARKED}, {"name": "tool_use", "template": FOR_TOOLS}]
    path = tokenizer_folder(tmp_path / "a", listed)
    config = json.loads(path.with_name("tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if form == "files":
        del config["chat_template"]
        path.with_name("chat_template.jinja").write_text(MARKED)
        path.with_name("additional_chat_templates").mkdir()
        (path.parent / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    said, other = chats(2)
    rows = [{"messages": said, "tools": [TOOL]}, {"messages": other}, {"messages": said, "tools": []}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared_chats(tmp_path / "out", tmp_path / "in.jsonl", tokenizer=path)
    found = np.fromfile(tmp_path / "out" / "00000.tokens", "<u2").tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent)
    wanted = (
        theirs.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows
    )
    assert found == [token for tokens in wanted for token in tokens]
    again = known_conversations(tmp_path / "out", read_manifest(tmp_path / "out"))
    assert again.template == find_template(str(path), None)
    assert again.template.sha256 == read_manifest(tmp_path / "out").chat.sha256


@pytest.mark.parametrize("lead", ["", "\n", "   ", "{#- a comment #}\n\n"])
def test_a_template_is_told_the_day_of_the_preparation_and_is_else_as_by_transformers(
    tmp_path, monkeypatch, lead
):
    path = tokenizer_folder(tmp_path, lead + ASKS)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Tenth)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=lead + ASKS)
    for messages in chats(3):
        text, spans = find_template(str(path), None, "2026-03-10").render(messages)
        assert text == theirs.apply_chat_template(messages, tokenize=False)
        assert [text[begin:end] for begin, end in spans] == [
            each["content"] + "<|im_end|>" for each in messages if each["role"] == "assistant"
        ]
    assert '10 Mar 2026"00\n' in text
    assert '29 Nov 2026"00\n' in find_template(str(path), None, "2026-11-29").render(messages)[0]


class Tenth:
    """Stands for ``datetime``."""

    @staticmethod
    def now():
        return datetime(2026, 3, 10)


def test_what_goes_on_or_is_repeated_another_day_has_the_same_tokens(tmp_path, monkeypatch):
    """Each process had told the moment at which it rendered, and no hash said so."""
    path, out = tokenizer_folder(tmp_path / "a", ASKS), tmp_path / "out"
    source = write_chats(tmp_path / "in.jsonl", chats(16))
    options = {"tokenizer": path, "unit_bytes": 1000}
    first = prepared_chats(tmp_path / "first", source, date="2026-03-10", **options).manifest
    assert len(first.shards) > 2
    monkeypatch.setattr("nanotrain_data.chat_template.today", lambda: "2026-03-10")
    with monkeypatch.context() as patched:
        write, done = unit_writer.write_shard, []

        def interrupted(*given, **named):
            if done:
                raise KeyboardInterrupt
            done.append(given)
            return write(*given, **named)

        patched.setattr(unit_writer, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared_chats(out, source, **options)
    monkeypatch.setattr("nanotrain_data.chat_template.today", lambda: "2026-03-11")
    assert prepared_chats(out, source, **options).manifest == first
    assert prepared_chats(out, source, **options).written == 0
    source.write_text(source.read_text().replace("Be short.", "Be brief."))
    changed = prepared_chats(out, source, **options)
    assert 0 < changed.written <= len(first.shards)
    assert (changed.manifest.chat.date, changed.manifest.chat.sha256) == ("2026-03-10", first.chat.sha256)
    later = prepared_chats(tmp_path / "later", source, **options).manifest
    assert later.chat.date == "2026-03-11"
    assert later.chat.sha256 != first.chat.sha256
    assert "10 Mar 2026" in known_conversations(out, first).template.render(chats(1)[0])[0]


def test_only_a_template_that_asks_is_told_a_day_and_its_format_is_written_there(tmp_path):
    path = tokenizer_folder(tmp_path)
    assert find_template(str(path), None, "2026-03-10").date is None
    path.with_name("chat_template.jinja").write_text("{{ strftime_now(messages[0].content) }}")
    with pytest.raises(DataError, match=r"template\.jinja gives strftime_now what is no string: expected"):
        find_template(str(path), None)
