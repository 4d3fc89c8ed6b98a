"""The layers of a GPT model, what their linears follow, and the table that a run starts with."""
