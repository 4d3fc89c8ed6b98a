"""The checks that refuse a launch. table.py lists them in the order in which they run."""
