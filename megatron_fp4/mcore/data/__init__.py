"""Text to what Megatron trains on: reading it, writing it, and the record beside it."""
