"""What docs/data.md shows of conversations is what its commands print."""

from command import nanotrain
from doc_blocks import ROOT, blocks, commands

from nanotrain_core.errors import Exit


def test_the_example_of_conversations_is_what_its_commands_print(tmp_path):
    page = [block for block in blocks() if block.page == ROOT / "docs/data.md"]
    (lines,) = (number for number, block in enumerate(page) if block.text.startswith('{"messages"'))
    (tmp_path / "chats.jsonl").write_text(page[lines].text)
    printed = ""
    for _, *words in commands(page[lines + 1]):
        done = nanotrain(*words, cwd=tmp_path)
        assert done.code == Exit.DONE, done.err
        printed += done.out
    assert printed == page[lines + 2].text
