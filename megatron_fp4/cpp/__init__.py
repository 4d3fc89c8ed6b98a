"""Repeats the recorded passes of linears in C++; see docs/how-it-works.md, The executor in C++."""
