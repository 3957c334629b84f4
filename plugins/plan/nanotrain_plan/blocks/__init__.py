"""Plans put together from blocks: layers, embedding and head, each measured once."""
