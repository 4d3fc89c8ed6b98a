"""What a launch asks for and cannot have, and why."""
