"""Models: the GPT-2 and Llama decoder and its layers, as PyTorch for one device."""
