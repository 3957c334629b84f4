"""What ranks of one host exchange through memory that they share, where gloo would use sockets."""
