"""Templates that are chosen or filled in by more than the messages: tools, and the day."""

import json

import numpy as np
import pytest
from chats import CHATML, MARKED, chats, prepared_chats, tokenizer_folder
from nanotrain_data.chat_template import find_template
from nanotrain_data.conversations import known_conversations
from nanotrain_data.manifest import read_manifest
from transformers import AutoTokenizer

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
    theirs = AutoTokenizer.from_pretrained(path.parent)
    wanted = (
        theirs.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows
    )
    assert found == [token for tokens in wanted for token in tokens]
    again = known_conversations(tmp_path / "out", read_manifest(tmp_path / "out"))
    assert again.template == find_template(str(path), None)
    assert again.template.sha256 == read_manifest(tmp_path / "out").chat.sha256
