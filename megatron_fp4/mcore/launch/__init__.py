"""From the command line to checked arguments, before anything is built."""
