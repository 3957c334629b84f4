"""What a recipe's model is, without a run: its layers, a roofline, its cache, what its size depends on."""
