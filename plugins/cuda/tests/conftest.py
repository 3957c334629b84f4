"""With ``TRITON_INTERPRET=1`` kernels run in Triton's interpreter, which must round as a GPU does."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from nanotrain_core.testing.triton_interpreter import put_right

    put_right()
