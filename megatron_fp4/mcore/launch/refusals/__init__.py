"""What a launch asks for and cannot have, and why; table.py has the order of asking."""
