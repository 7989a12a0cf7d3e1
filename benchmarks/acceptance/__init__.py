"""What accept.py runs: one module for each kind of check, and the clocks."""
