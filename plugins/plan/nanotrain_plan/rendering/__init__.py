"""Sentences, tables and pictures, and how a terminal, a page and JSON show them."""
