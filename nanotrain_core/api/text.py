"""The names for data components and commands that convert text to tokens and tokens to text.

Torch-free, except :func:`sample_token`. Files of the core may move; these names stay.
"""

from typing import TYPE_CHECKING, Any

from nanotrain_core.data.codec import EncodesSpecial, HasConversations, HasPrefix, HasTokenizer, TextCodec
from nanotrain_core.data.documents import Source as TextSource
from nanotrain_core.data.documents import missing_path
from nanotrain_core.data.hashed_tokens import BLOCK_BYTES, HASH_BYTES, HashedTokens, Tokens, block_hashes
from nanotrain_core.data.held_out import Split, held_out
from nanotrain_core.data.tokenizer_files import open_tokenizer_file
from nanotrain_core.data.tokenizers import END_OF_TEXT, Tokenizer, make_tokenizer
from nanotrain_core.deprecated import attribute_of

if TYPE_CHECKING:
    from nanotrain_core.models.sampling import sample_token

__all__ = [
    "BLOCK_BYTES",
    "END_OF_TEXT",
    "HASH_BYTES",
    "EncodesSpecial",
    "HasConversations",
    "HasPrefix",
    "HasTokenizer",
    "HashedTokens",
    "Split",
    "TextCodec",
    "TextSource",
    "Tokenizer",
    "Tokens",
    "block_hashes",
    "held_out",
    "make_tokenizer",
    "missing_path",
    "open_tokenizer_file",
    "sample_token",
]

_deprecated = attribute_of(__name__)


def __getattr__(name: str) -> Any:
    if name == "sample_token":  # the only one that needs torch, which readers of tokens do not import
        from nanotrain_core.models.sampling import sample_token

        return sample_token
    return _deprecated(name)
