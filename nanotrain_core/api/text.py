"""What data components and commands may import that turn text into tokens and tokens into text.

Files of the core may move; these names stay.
"""

from nanotrain_core.contracts.data import HasTokenizer, TextCodec
from nanotrain_core.data.tokenizers import make_tokenizer
from nanotrain_core.deprecated import attribute_of
from nanotrain_core.models.sampling import draw

__all__ = ["HasTokenizer", "TextCodec", "draw", "make_tokenizer"]

__getattr__ = attribute_of(__name__)
