"""How times are taken: replayed graphs on a GPU, the clock on the host, and a plain read of the same bytes.

Needs torch, which callers bring, and nothing of the builder.
"""
