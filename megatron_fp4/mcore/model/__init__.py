"""The layers of a GPT model, the recipes of their linears, and the table printed at the start."""
