"""What of a run becomes graphs of ``torch.compile``, and what stays eager."""
