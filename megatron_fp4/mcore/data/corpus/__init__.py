"""Tokenizes a corpus of any size, in parallel, into Megatron's indexed format; it can be resumed.

The corpus is read in blocks of some megabytes (blocks.py). Worker processes tokenize them
(encoding.py), each into a file of its own, called a part (parts.py). At the end the parts are
merged in the order of the text (merging.py), so the result does not depend on the number of
workers. preprocess.py in the folder above is the command.
"""
